{{- define "prfaas.name" -}}
{{- .Release.Name | trunc 30 | trimSuffix "-" -}}
{{- end -}}

{{- define "prfaas.labels" -}}
app.kubernetes.io/name: prfaas
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "prfaas.selector" -}}
app.kubernetes.io/name: prfaas
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* What a pod may do: nothing that a process without rights may not. */}}
{{- define "prfaas.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "prfaas.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end -}}

{{- define "prfaas.image" -}}
{{- $image := mergeOverwrite (deepCopy .root.Values.image) .image -}}
{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end -}}

{{/* A certificate of the pod's own: `role` and `cluster` give its rights, `host` is how others reach it. */}}
{{- define "prfaas.certificate" -}}
{{- $certificates := .root.Values.certificates -}}
driver: csi.cert-manager.io
readOnly: true
volumeAttributes:
  csi.cert-manager.io/issuer-name: {{ $certificates.issuer.name | quote }}
  csi.cert-manager.io/issuer-kind: {{ $certificates.issuer.kind | quote }}
  csi.cert-manager.io/issuer-group: {{ $certificates.issuer.group | quote }}
  csi.cert-manager.io/duration: {{ $certificates.duration | quote }}
  csi.cert-manager.io/uri-sans: {{ printf "spiffe://%s/%s/%s/${POD_NAME}" $certificates.trust .cluster .role | quote }}
  csi.cert-manager.io/dns-names: {{ .host | quote }}
  csi.cert-manager.io/key-usages: "digital signature,server auth,client auth"
  csi.cert-manager.io/fs-group: "10001"
{{- end -}}

{{/* Where its files are, in node's and gateway's files alike; without them, everything is in clear. */}}
{{- define "prfaas.identity" -}}
{{- if eq .Values.certificates.mode "csi" -}}
certificate = "/certificates/tls.crt"
key = "/certificates/tls.key"
authority = "/certificates/ca.crt"
{{- else -}}
plain = true
{{- end }}
{{- if .Values.namesSecret }}
names_secret = "/names/names.secret"
{{- end }}
{{- end -}}

{{/* Every pool with what poolDefaults says for it. */}}
{{- define "prfaas.pools" -}}
{{- $pools := list -}}
{{- range .Values.pools -}}
{{- $pools = append $pools (mergeOverwrite (deepCopy $.Values.poolDefaults) .) -}}
{{- end -}}
{{- toJson $pools -}}
{{- end -}}
