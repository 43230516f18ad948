{{- define "fdcache.labels" -}}
app.kubernetes.io/name: fdcache
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "fdcache.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* A folder of its own below the arena, so that the pods of a node share the socket as they share the memory. */}}
{{- define "fdcache.runtime" -}}
{{ .Values.service.arena }}/fdcache-run-{{ .Release.Name }}
{{- end }}

{{- define "fdcache.server" -}}
ipc://{{ include "fdcache.runtime" . }}/fdcache.sock
{{- end }}

{{- define "fdcache.pod" -}}
# A Service called fdcache would otherwise put FDCACHE_PORT and its like into the environment.
enableServiceLinks: false
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.user }}
  runAsGroup: {{ .Values.user }}
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "fdcache.container" -}}
image: {{ include "fdcache.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* The node's own, so that all pods on it map the same memory. */}}
{{- define "fdcache.memory" -}}
- name: node-memory
  hostPath: {path: {{ .Values.service.arena }}, type: Directory}
{{- end }}

{{- define "fdcache.keys" -}}
- name: keys
  secret:
    secretName: {{ .Values.keys.secret }}
    items: [{key: FD_API_KEY, path: FD_API_KEY, mode: 292}]
{{- end }}
