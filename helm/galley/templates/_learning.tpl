{{/* The pod that trains drafts on the traffic (docs/operate/learning.md). */}}

{{/* The target's model, as --target: that of the release, or the one in the image. */}}
{{- define "galley.learningTarget" -}}
{{- .Values.learning.target | default .Values.model | default "/models/default" -}}
{{- end -}}

{{/* The directory of the draft that the replicas began with. */}}
{{- define "galley.learningStart" -}}
{{- .Values.learning.start | default .Values.draft.settings.model | default "" -}}
{{- end -}}

{{- define "galley.validateLearning" -}}
{{- if .Values.learning.enabled -}}
{{- if not .Values.draft.enabled -}}
{{- fail "learning.enabled: must be false with draft.enabled false" -}}
{{- end -}}
{{- if not .Values.gateway.settings.learn_tokens -}}
{{- fail "gateway.settings.learn_tokens: must be above 0 with learning.enabled, because nothing is collected without it" -}}
{{- end -}}
{{- $takes := false -}}
{{- range include "galley.draftPools" . | fromJsonArray -}}{{- if .values.settings.max_load_mib }}{{ $takes = true }}{{ end -}}{{- end -}}
{{- if not $takes -}}
{{- fail "draft.settings.max_load_mib: must be above 0 with learning.enabled, because drafts take no other weights without it" -}}
{{- end -}}
{{- $start := include "galley.learningStart" . -}}
{{- if include "galley.isHubId" $start -}}
{{- fail (printf "learning.start: must be a directory in the pods, got %s" $start) -}}
{{- end -}}
{{- if not $start -}}
{{- fail "learning.start: must be set, because draft.settings.model is empty" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "galley.learningPod" -}}
{{- $values := .root.Values -}}
{{ include "galley.podCommon" . }}
# SIGTERM ends the training within a step.
terminationGracePeriodSeconds: 60
{{- include "galley.placement" . }}
{{- include "galley.download" . | nindent 0 }}
containers:
  - {{ include "galley.container" . | nindent 4 | trim }}
      - {name: learning, mountPath: /var/lib/galley/learning}
    command: [python, -m, galley.cli, distill, /var/lib/galley/learning]
    args:
      - --follow
      - --target
      - {{ include "galley.learningTarget" .root | quote }}
      - --start
      - {{ include "galley.learningStart" .root | quote }}
      {{- if and .root.Values.draft.settings.version (not .values.options.start_version) (has .values.start (list "" .root.Values.draft.settings.model)) }}
      - --start-version
      - {{ .root.Values.draft.settings.version | quote }}
      {{- end }}
      {{- range $key, $value := .values.options }}
      - --{{ replace "_" "-" $key }}
      - {{ include "galley.text" $value | quote }}
      {{- end }}
    env:
      - name: GALLEY_LEARNING_REDIS_URL
        {{- include "galley.redisUrl" . | nindent 8 }}
      - name: GALLEY_LEARNING_POOL
        value: {{ printf "%s.%s" .root.Release.Namespace .root.Release.Name | toYaml }}
      {{- if $values.tls.enabled }}
      - name: GALLEY_GATEWAY_PEER_CA_FILE
        value: /etc/galley/peer-tls/ca.crt
      {{- if $values.tls.mutual }}
      - name: GALLEY_GATEWAY_PEER_CERT_FILE
        value: /etc/galley/peer-tls/tls.crt
      - name: GALLEY_GATEWAY_PEER_KEY_FILE
        value: /etc/galley/peer-tls/tls.key
      {{- end }}
      - name: GALLEY_GATEWAY_DRAFT_TLS_NAME
        value: {{ include "galley.tlsName" (dict "root" .root "role" "draft") }}
      {{- end }}
      {{- include "galley.hubEnv" . | nindent 6 }}
volumes:
  {{- include "galley.volumes" . | nindent 2 }}
  - name: learning
    persistentVolumeClaim:
      claimName: {{ .values.persistence.existingClaim | default (include "galley.roleName" (pick . "root" "role")) }}
{{- end -}}
