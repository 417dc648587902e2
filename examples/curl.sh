#!/usr/bin/env bash
# A gateway by curl alone: `GATEWAY=http://127.0.0.1:8000 API_KEY=… examples/curl.sh`.
set -euo pipefail
gateway=${GATEWAY:-http://127.0.0.1:8000}
ask() { curl --silent --show-error --fail-with-body --header "Authorization: Bearer ${API_KEY:-unused}" "$@"; }
model=$(ask "$gateway/v1/models" | sed -E 's/.*"id": ?"([^"]+)".*/\1/')

echo "# A chat with $model"
chat='{"model": "'$model'", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8'
ask "$gateway/v1/chat/completions" --json "$chat}"

echo; echo "# The same as a stream"
ask --no-buffer "$gateway/v1/chat/completions" --json "$chat, \"stream\": true}"

echo "# How it was routed"
ask --output /dev/null --dump-header - "$gateway/v1/chat/completions" --json "$chat}" | grep -i '^x-prfaas-route'

echo "# Where a longer prompt would go, and why; nothing is computed (with tenants, this takes an operator's key)"
prompt=$(printf 'word %.0s' {1..2000})
ask "$gateway/prfaas/explain" --json '{"model": "'$model'", "prompt": "'"$prompt"'"}'
echo
