{{- define "galley.draftPod" -}}
{{ include "galley.podHead" . }}
{{- include "galley.download" . | nindent 0 }}
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
    {{- include "galley.probes" (dict "port" .values.healthPort "startupSeconds" .values.startupTimeoutSeconds) | nindent 4 }}
    {{- include "galley.lifecycle" . | nindent 4 }}
volumes:
  {{- include "galley.volumes" . | nindent 2 }}
{{- end -}}
