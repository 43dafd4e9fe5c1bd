{{/* Where GALLEY_<ROLE>_REDIS_URL comes from; galley.validate sees that it is exactly one of the three ways. */}}
{{- define "galley.redisUrl" -}}
{{- $redis := .root.Values.redis -}}
{{- $secret := $redis.existingSecret -}}
{{- if $secret.name -}}
valueFrom:
  secretKeyRef:
    name: {{ $secret.name }}
    key: {{ if ne .role "gateway" }}{{ $secret.replicaKey | default $secret.key }}{{ else }}{{ $secret.key }}{{ end }}
{{- else if $redis.url -}}
value: {{ $redis.url | quote }}
{{- else -}}
value: redis://{{ include "galley.name" .root }}-redis:{{ $redis.embedded.port }}/0
{{- end -}}
{{- end -}}
