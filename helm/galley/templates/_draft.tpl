{{- define "galley.draftPod" -}}
{{ include "galley.podHead" . }}
{{- with .values.settings.model }}
{{- include "galley.download" (merge (dict "model" .) $) | nindent 0 }}
{{- end }}
containers:
  - {{ include "galley.container" . | nindent 4 | trim }}
    ports:
      {{- include "galley.ports" . | nindent 6 }}
    env:
      {{- include "galley.env" . | nindent 6 }}
      {{- include "galley.advertiseEnv" . | nindent 6 }}
      {{- if and .values.gpus (not .values.settings.device) }}
      - name: GALLEY_DRAFT_DEVICE
        value: cuda
      {{- end }}
      {{- if not .values.settings.model }}
      - name: GALLEY_DRAFT_TOKENIZER
        value: {{ .root.Values.model | default "/models/default" | quote }}
      {{- end }}
      {{- if include "galley.isHubId" .values.settings.model }}
      {{- include "galley.hubTokenEnv" .root | nindent 6 }}
      {{- end }}
    {{- include "galley.probes" (dict "port" .values.healthPort "startupSeconds" .values.startupTimeoutSeconds) | nindent 4 }}
    {{- include "galley.lifecycle" . | nindent 4 }}
volumes:
  {{- include "galley.volumes" . | nindent 2 }}
{{- end -}}
