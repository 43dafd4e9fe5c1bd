{{/* Volumes of a role's pods and their mounts. */}}

{{- define "galley.mounts" -}}
{{- $values := .root.Values -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/galley}
{{- if include "galley.needsSharedMemory" . }}
- {name: shared-memory, mountPath: /dev/shm}
{{- end }}
{{- if include "galley.modelVolume" . }}
- {name: models, mountPath: {{ $values.modelVolume.mountPath }}, readOnly: true}
{{- end }}
{{- range include "galley.secretMounts" . | fromYamlArray }}
- {name: {{ .name }}, mountPath: {{ .path }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "galley.volumes" -}}
{{- $values := .root.Values -}}
{{ include "galley.cacheVolumes" . }}
{{- if include "galley.needsSharedMemory" . }}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ $values.target.sharedMemory }}}
{{- end }}
{{- with include "galley.modelVolume" . }}
- name: models
  {{- . | nindent 2 }}
{{- end }}
{{- range include "galley.secretMounts" . | fromYamlArray }}
- name: {{ .name }}
  {{- if .configMap }}
  configMap: {name: {{ .configMap }}}
  {{- else }}
  # Readable by the containers' group only (fsGroup). Mounted as a directory, so that rotated secrets arrive.
  secret: {secretName: {{ .secret }}, defaultMode: 0440}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The directories that pods write to. Gateways need the shared cache only for a tokenizer of the hub. */}}
{{- define "galley.cacheVolumes" -}}
{{- $cache := .root.Values.modelCache -}}
- name: tmp
  emptyDir: {sizeLimit: {{ .scratch | default .root.Values.scratchSizeLimit }}}
- name: cache
{{- if and $cache.persistence.enabled (or (ne .role "gateway") (include "galley.hubModel" .)) }}
  persistentVolumeClaim:
    claimName: {{ include "galley.cacheClaim" .root }}
{{- else }}
  emptyDir: {sizeLimit: {{ $cache.sizeLimit }}}
{{- end }}
{{- end -}}

{{/* The source of the volume with a role's model; empty if there is none. */}}
{{- define "galley.modelVolume" -}}
{{- $volume := .root.Values.modelVolume -}}
{{- $image := .values.modelImage | default .root.Values.modelImage -}}
{{- if $image -}}
image: {reference: {{ $image | quote }}, pullPolicy: {{ .root.Values.image.pullPolicy }}}
{{- else if $volume.existingClaim -}}
persistentVolumeClaim: {claimName: {{ $volume.existingClaim }}, readOnly: true}
{{- else if $volume.hostPath -}}
hostPath: {path: {{ $volume.hostPath }}, type: Directory}
{{- end -}}
{{- end -}}

{{- define "galley.cacheClaim" -}}
{{- .Values.modelCache.persistence.existingClaim | default (printf "%s-model-cache" (include "galley.name" .)) -}}
{{- end -}}

{{/* Shared memory for the ranks of a pod; Kubernetes' default is 64 MiB. KubeRay mounts its own. */}}
{{- define "galley.needsSharedMemory" -}}
{{- $target := .root.Values.target -}}
{{- if and (eq .role "target") (gt (int $target.tensorParallel) 1) (ne $target.kind "rayservice") }}true{{ end -}}
{{- end -}}

{{/* The role's mounts below /etc/galley: a list of {name, path, secret or configMap}. */}}
{{- define "galley.secretMounts" -}}
{{- $values := .root.Values -}}
{{- $found := list -}}
{{- if and $values.tls.enabled (eq .role "learning") -}}
{{- $found = append $found (dict "name" "peer-tls" "path" "/etc/galley/peer-tls" "secret" (include "galley.peerSecret" .root)) -}}
{{- else if $values.tls.enabled -}}
{{- $tls := index $values.tls .role -}}
{{- $found = append $found (dict "name" "tls" "path" "/etc/galley/tls" "secret" (include "galley.tlsSecret" .)) -}}
{{- if eq .role "gateway" -}}
{{- $found = append $found (dict "name" "peer-tls" "path" "/etc/galley/peer-tls" "secret" (include "galley.peerSecret" .root)) -}}
{{- with $tls.clientCaSecretName -}}
{{- $found = append $found (dict "name" "client-ca" "path" "/etc/galley/client-ca" "secret" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq .role "gateway" -}}
{{- with $values.auth.apiKeys.secretName -}}
{{- $found = append $found (dict "name" "api-keys" "path" "/etc/galley/api-keys" "secret" .) -}}
{{- end -}}
{{- if $values.auth.jwt.enabled -}}
{{- with $values.auth.jwt.jwksConfigMap.name -}}
{{- $found = append $found (dict "name" "jwks" "path" "/etc/galley/jwks" "configMap" .) -}}
{{- end -}}
{{- with $values.auth.jwt.caSecretName -}}
{{- $found = append $found (dict "name" "jwt-ca" "path" "/etc/galley/jwt-ca" "secret" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $values.redis.tlsSecretName -}}
{{- $found = append $found (dict "name" "redis-tls" "path" "/etc/galley/redis-tls" "secret" .) -}}
{{- end -}}
{{- with $values.otel.caSecretName -}}
{{- $found = append $found (dict "name" "otel-ca" "path" "/etc/galley/otel-ca" "secret" .) -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}
