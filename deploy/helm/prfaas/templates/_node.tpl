{{/* What keeps the pods of a pool: a StatefulSet or a LeaderWorkerSet of its own, or a DisaggregatedSet of several pools. */}}
{{- define "prfaas.kind" -}}
{{- if .set }}DisaggregatedSet{{ else if .groupSize }}LeaderWorkerSet{{ else }}StatefulSet{{ end -}}
{{- end -}}

{{/* A group of pods: one, or the data parallel ranks of one mixture of experts, which begin and end together. */}}
{{- define "prfaas.group" -}}
{{- $size := max 1 (int .pool.groupSize) -}}
leaderWorkerTemplate:
  size: {{ $size }}
  restartPolicy: {{ if gt $size 1 }}RecreateGroupOnPodRestart{{ else }}None{{ end }}
  workerTemplate:
    {{- include "prfaas.nodePod" . | nindent 4 }}
{{- end -}}

{{/* The pod of a node of `pool`. */}}
{{- define "prfaas.nodePod" -}}
{{- $root := .root -}}
{{- $sealed := eq $root.Values.certificates.mode "csi" -}}
{{- with .pool -}}
{{- $pool := printf "%s-%s" (include "prfaas.name" $root) .name -}}
{{- $subdomain := printf "%s-%s" (include "prfaas.name" $root) (.set | default .name) -}}
metadata:
  labels:
    {{- include "prfaas.selector" $root | nindent 4 }}
    app.kubernetes.io/component: node
    prfaas/pool: {{ .name }}
    prfaas/role: {{ .role }}
  annotations:
    prfaas/cluster: {{ .cluster | quote }}
    prfaas/config: {{ list (omit . "replicas" "scale" "groupSize" "set") $root.Values.model $root.Values.ports $root.Values.certificates $root.Values.namesSecret | toJson | sha256sum | trunc 16 | quote }}
    {{- if .set }}
    # The controller names each revision's pods anew; their certificates carry this in place of that name.
    prfaas/certificate-subdomain: {{ $subdomain }}
    {{- end }}
    {{- with .annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add .drainTimeoutS 60 }}
  {{- if .hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  securityContext:
    {{- include "prfaas.podSecurity" $root | nindent 4 }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  containers:
    - name: node
      image: {{ include "prfaas.image" (dict "root" $root "image" .image) | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args: [node, -c, /etc/prfaas/node.toml, --node-id, $(POD_NAME), --host, $(POD_IP){{ if gt (int .groupSize) 1 }}, --engine-max-restarts, "0", --, --data-parallel-size, $(LWS_GROUP_SIZE), --data-parallel-rank, $(LWS_WORKER_INDEX), --data-parallel-address, $(LWS_LEADER_ADDRESS){{ end }}]
      env:
        - { name: POD_NAME, valueFrom: { fieldRef: { fieldPath: metadata.name } } }
        - { name: POD_IP, valueFrom: { fieldRef: { fieldPath: {{ if .hostNetwork }}status.hostIP{{ else }}status.podIP{{ end }} } } }
        - { name: HOME, value: /var/lib/prfaas }
        {{- with .env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- range $port := list "control" "calls" "transfer" "engine" "metrics" }}
        - { name: {{ $port }}, containerPort: {{ get $root.Values.ports $port }} }
        {{- end }}
      # An engine may take long to load a model; the agent starts a dead one again by itself.
      startupProbe:
        httpGet: { path: /health, port: metrics, scheme: {{ if $sealed }}HTTPS{{ else }}HTTP{{ end }} }
        periodSeconds: 5
        failureThreshold: {{ add (div .engineStartTimeoutS 5) 12 }}
      readinessProbe:
        httpGet: { path: /health, port: metrics, scheme: {{ if $sealed }}HTTPS{{ else }}HTTP{{ end }} }
        periodSeconds: 5
      livenessProbe:
        tcpSocket: { port: control }
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      securityContext:
        {{- include "prfaas.containerSecurity" $root | nindent 8 }}
      {{- with .resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        - { name: config, mountPath: /etc/prfaas, readOnly: true }
        - { name: metrics-key, mountPath: /metrics-key, readOnly: true }
        - { name: models, mountPath: /models, readOnly: true }
        - { name: shm, mountPath: /dev/shm }
        - { name: state, mountPath: /var/lib/prfaas }
        - { name: tmp, mountPath: /tmp }
        {{- if $sealed }}
        - { name: certificates, mountPath: /certificates, readOnly: true }
        {{- end }}
        {{- if $root.Values.namesSecret }}
        - { name: names, mountPath: /names, readOnly: true }
        {{- end }}
        {{- with .volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - { name: config, configMap: { name: {{ $pool }} } }
    - name: metrics-key
      secret:
        secretName: {{ $root.Values.metricsSecret }}
        defaultMode: 0440
        items: [{ key: prometheus.sha256, path: prometheus.sha256 }]
    - name: models
      {{- toYaml $root.Values.model.volume | nindent 6 }}
    # The arena of pages, and a little for the engine.
    - { name: shm, emptyDir: { medium: Memory, sizeLimit: {{ add (int64 .cacheBytes) 1073741824 | quote }} } }
    - { name: state, emptyDir: {} }
    - { name: tmp, emptyDir: {} }
    {{- if $sealed }}
    - name: certificates
      csi:
        {{- $host := printf "${POD_NAME}.%s.%s.svc,${POD_NAME}.%s.%s.svc.%s" $subdomain $root.Release.Namespace $subdomain $root.Release.Namespace $root.Values.certificates.clusterDomain }}
        {{- $role := ternary "prefill" "node" (eq .clusterKind "prfaas") }}
        {{- include "prfaas.certificate" (dict "root" $root "cluster" .cluster "role" $role "host" $host) | nindent 8 }}
    {{- end }}
    {{- if $root.Values.namesSecret }}
    - name: names
      secret: { secretName: {{ $root.Values.namesSecret }}, defaultMode: 0440 }
    {{- end }}
    {{- with .volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .nodeSelector }}
  nodeSelector: {{ toJson . }}
  {{- end }}
  {{- with .tolerations }}
  tolerations: {{ toJson . }}
  {{- end }}
  {{- with .affinity }}
  affinity: {{ toJson . }}
  {{- end }}
  {{- with .topologySpreadConstraints }}
  topologySpreadConstraints: {{ toJson . }}
  {{- end }}
{{- end -}}
{{- end -}}
