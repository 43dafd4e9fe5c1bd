{{/* The value of GALLEY_GATEWAY_REDIS_URL and GALLEY_TARGET_REDIS_URL; exactly one of the three ways to say it. */}}
{{- define "galley.redisUrl" -}}
{{- $redis := .Values.redis -}}
{{- $ways := list -}}
{{- if $redis.url }}{{ $ways = append $ways "redis.url" }}{{ end -}}
{{- if $redis.existingSecret.name }}{{ $ways = append $ways "redis.existingSecret.name" }}{{ end -}}
{{- if $redis.embedded.enabled }}{{ $ways = append $ways "redis.embedded.enabled" }}{{ end -}}
{{- if ne (len $ways) 1 -}}
{{- fail (printf "set exactly one of redis.url, redis.existingSecret.name and redis.embedded.enabled; set: %s" (join ", " $ways | default "none")) -}}
{{- end -}}
{{- if $redis.existingSecret.name -}}
valueFrom:
  secretKeyRef:
    name: {{ $redis.existingSecret.name }}
    key: {{ $redis.existingSecret.key }}
{{- else if $redis.url -}}
value: {{ $redis.url | quote }}
{{- else -}}
value: redis://{{ include "galley.name" . }}-redis:{{ $redis.embedded.port }}/0
{{- end -}}
{{- end -}}
