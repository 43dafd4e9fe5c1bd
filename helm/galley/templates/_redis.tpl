{{/* Three quarters of the memory limit, in bytes; the rest is for a rewrite of the append-only file. Empty without a limit. */}}
{{- define "galley.storeMemory" -}}
{{- $limit := dig "limits" "memory" "" .Values.redis.embedded.resources | include "galley.bytes" | int64 -}}
{{- if $limit -}}{{- div (mul $limit 3) 4 -}}{{- end -}}
{{- end -}}

{{/* The value of GALLEY_<ROLE>_REDIS_URL; galley.validate requires exactly one of its three sources. */}}
{{- define "galley.redisUrl" -}}
{{- $redis := .root.Values.redis -}}
{{- $secret := $redis.existingSecret -}}
{{- if $secret.name -}}
valueFrom:
  secretKeyRef:
    name: {{ $secret.name }}
    {{- $replicas := $secret.replicaKey | default $secret.key }}
    {{- $own := dict "gateway" $secret.key "draft" ($secret.draftKey | default $replicas) "learning" ($secret.learningKey | default $secret.key) }}
    key: {{ get $own .role | default $replicas }}
{{- else if $redis.url -}}
value: {{ $redis.url | quote }}
{{- else -}}
value: redis://{{ include "galley.name" .root }}-redis:{{ $redis.embedded.port }}/0
{{- end -}}
{{- end -}}

{{/* The trial store's image, with global.imageRegistry in the place of its registry. */}}
{{- define "galley.storeImage" -}}
{{- $image := .values.image -}}
{{- with (.root.Values.global).imageRegistry -}}
{{- $image = printf "%s/%s" . (regexReplaceAll "^([^/]*[.:][^/]*|localhost)/" $image "") -}}
{{- end -}}
{{- $image -}}
{{- end -}}

{{/* The trial store. */}}
{{- define "galley.redisPod" -}}
{{ include "galley.podCommon" . }}
terminationGracePeriodSeconds: 30
{{- include "galley.placement" . }}
containers:
  - name: redis
    image: {{ include "galley.storeImage" . }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    # With the append-only file the token log survives a restart.
    command: [valkey-server]
    args:
      - --port
      - {{ .values.port | quote }}
      - --dir
      - /data
      - --appendonly
      - "yes"
      - --appendfsync
      - everysec
      - --save
      - ""
      # An evicted log is a lost session.
      - --maxmemory-policy
      - noeviction
      # Record what takes longer, in ms, for `latency doctor`.
      - --latency-monitor-threshold
      - "100"
      {{- with include "galley.storeMemory" .root }}
      # When this is full, the server refuses writes, and streams wait until sessions expire. Without it the kubelet
      # would kill the server, which would be as large again after its restart.
      - --maxmemory
      - {{ . | quote }}
      {{- end }}
      # Without a password, the server would otherwise accept connections only from its own pod.
      - --protected-mode
      - "no"
    ports:
      - {name: redis, containerPort: {{ .values.port }}, protocol: TCP}
    securityContext:
      {{- include "galley.containerSecurity" . | nindent 6 }}
    # -e: exit non-zero on errors, which the server returns while it loads its file.
    startupProbe:
      exec: {command: [valkey-cli, -e, -p, {{ .values.port | quote }}, ping]}
      periodSeconds: 1
      failureThreshold: 60
    readinessProbe:
      exec: {command: [valkey-cli, -e, -p, {{ .values.port | quote }}, ping]}
      periodSeconds: 5
      timeoutSeconds: 2
    livenessProbe:
      tcpSocket: {port: redis}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 6
    resources:
      {{- toYaml .values.resources | nindent 6 }}
    volumeMounts:
      - {name: data, mountPath: /data}
{{- end -}}
