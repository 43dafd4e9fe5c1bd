{{/* Start-up time limit of a gateway, which includes waiting for a target. */}}
{{- define "galley.gatewayStartup" -}}
{{- add .Values.target.startupTimeoutSeconds 60 -}}
{{- end -}}

{{/* appProtocol of the gateway's gRPC port. */}}
{{- define "galley.grpcProtocol" -}}
{{- if .Values.tls.enabled }}https{{ else }}kubernetes.io/h2c{{ end -}}
{{- end -}}

{{/* Environment of the gateway. It finds targets and drafts in the store. */}}
{{- define "galley.gatewayEnv" -}}
- name: GALLEY_GATEWAY_HTTP_PORT
  value: {{ .Values.gateway.httpPort | quote }}
# A target may take long to load: wait for it instead of restarting.
- name: GALLEY_GATEWAY_STARTUP_TIMEOUT_S
  value: {{ .Values.target.startupTimeoutSeconds | quote }}
{{- if not .Values.draft.enabled }}
- name: GALLEY_GATEWAY_DRAFT
  value: none
{{- end }}
{{- if include "galley.hasCanary" . }}
- name: GALLEY_GATEWAY_DRAFT_SPLIT
  value: {{ printf "%s=%v" .Values.draft.canary.version .Values.draft.canary.share | quote }}
{{- end }}
{{- with .Values.model }}
- name: GALLEY_GATEWAY_MODEL
  value: {{ . | quote }}
{{- end }}
{{- with .Values.auth.idSecret }}
{{- if .secretName }}
- name: GALLEY_GATEWAY_ID_SECRET
  valueFrom:
    secretKeyRef: {name: {{ .secretName }}, key: {{ .key }}}
{{- end }}
{{- end }}
{{- with .Values.auth.apiKeys }}
{{- if .secretName }}
- name: GALLEY_GATEWAY_API_KEYS_FILE
  value: /etc/galley/api-keys/{{ .key }}
{{- end }}
{{- end }}
{{- include "galley.jwtEnv" .Values.auth.jwt }}
{{- end -}}

{{- define "galley.jwtEnv" -}}
{{- if .enabled }}
- name: GALLEY_GATEWAY_JWT_ISSUER
  value: {{ .issuer | quote }}
- name: GALLEY_GATEWAY_JWT_AUDIENCE
  value: {{ .audience | quote }}
{{- if .jwksConfigMap.name }}
- name: GALLEY_GATEWAY_JWT_JWKS_FILE
  value: /etc/galley/jwks/{{ .jwksConfigMap.key }}
{{- else if .jwksUrl }}
- name: GALLEY_GATEWAY_JWT_JWKS_URL
  value: {{ .jwksUrl | quote }}
{{- end }}
{{- if .caSecretName }}
- name: GALLEY_GATEWAY_JWT_CA_FILE
  value: /etc/galley/jwt-ca/ca.crt
{{- end }}
- name: GALLEY_GATEWAY_JWT_ALGORITHMS
  value: {{ join "," .algorithms | quote }}
- name: GALLEY_GATEWAY_JWT_PRINCIPAL_CLAIM
  value: {{ .principalClaim | quote }}
{{- end }}
{{- end -}}

{{- define "galley.gatewayPod" -}}
{{ include "galley.podHead" . }}
{{- include "galley.download" . | nindent 0 }}
containers:
  - {{ include "galley.container" . | nindent 4 | trim }}
    ports:
      {{- include "galley.ports" . | nindent 6 }}
    env:
      {{- include "galley.env" . | nindent 6 }}
      {{- include "galley.gatewayEnv" .root | nindent 6 }}
    {{- include "galley.probes" (dict "port" .values.healthPort "startupSeconds" (include "galley.gatewayStartup" .root)) | nindent 4 }}
    {{- include "galley.lifecycle" . | nindent 4 }}
volumes:
  {{- include "galley.volumes" . | nindent 2 }}
{{- end -}}
