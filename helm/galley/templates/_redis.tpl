{{/*
Three quarters of the memory limit, in bytes; the rest is for a rewrite of the append-only file. Empty unless the limit is
a whole number of M, G, Mi or Gi.
*/}}
{{- define "galley.storeMemory" -}}
{{- $limit := dig "limits" "memory" "" .Values.redis.embedded.resources | toString -}}
{{- $unit := regexFind "[A-Za-z]+$" $limit -}}
{{- $number := trimSuffix $unit $limit -}}
{{- $units := dict "M" 1000000 "G" 1000000000 "Mi" 1048576 "Gi" 1073741824 -}}
{{- if and (hasKey $units $unit) (regexMatch "^[0-9]+$" $number) -}}
{{- div (mul (int64 $number) (get $units $unit) 3) 4 -}}
{{- end -}}
{{- end -}}

{{/* The value of GALLEY_<ROLE>_REDIS_URL; galley.validate requires exactly one of its three sources. */}}
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
