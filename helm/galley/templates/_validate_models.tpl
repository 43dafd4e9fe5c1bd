{{/* Refusals of values of models. */}}

{{- define "galley.validateModels" -}}
{{- $values := .Values -}}
{{- $cache := $values.modelCache -}}
{{- $volume := $values.modelVolume -}}
{{- $sources := list -}}
{{- $images := list $values.modelImage -}}
{{- range include "galley.pools" . | fromJsonArray -}}{{- $images = append $images .values.modelImage -}}{{- end -}}
{{- if compact $images }}{{ $sources = append $sources "modelImage" }}{{ end -}}
{{- if $volume.existingClaim }}{{ $sources = append $sources "modelVolume.existingClaim" }}{{ end -}}
{{- if $volume.hostPath }}{{ $sources = append $sources "modelVolume.hostPath" }}{{ end -}}
{{- if gt (len $sources) 1 -}}
{{- fail (printf "modelVolume: must have one source at %s, got %s" $volume.mountPath (join " and " $sources)) -}}
{{- end -}}
{{- if and (has "modelImage" $sources) (semverCompare "<1.33-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "modelImage: must be empty below Kubernetes 1.33, which mounts no images as volumes, got %s; use modelVolume.existingClaim" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and $cache.download.enabled (eq (include "galley.hubModels" .) "[]") -}}
{{- fail "modelCache.download.enabled: must be false unless model or draft.settings.model is a hub id; there is nothing to download" -}}
{{- end -}}
{{- if and (include "galley.hasDownloadJob" .) (not $cache.persistence.enabled) -}}
{{- fail "modelCache.download.mode: must be initContainer without modelCache.persistence.enabled; a Job needs a claim to fill" -}}
{{- end -}}
{{- include "galley.validateModelSizes" . -}}
{{- end -}}

{{/* Refuse a cache that cannot hold the hub models whose size is told. */}}
{{- define "galley.validateModelSizes" -}}
{{- $cache := .Values.modelCache -}}
{{- $sizes := dict -}}
{{- if include "galley.isHubId" .Values.model -}}{{- $_ := set $sizes "modelSize" .Values.modelSize -}}{{- end -}}
{{- range include "galley.draftPools" . | fromJsonArray -}}
{{- if include "galley.isHubId" .values.settings.model -}}{{- $_ := set $sizes (printf "%s.modelSize" .path) .values.modelSize -}}{{- end -}}
{{- end -}}
{{- $total := 0 -}}
{{- range $name, $size := $sizes -}}
{{- $total = add $total (include "galley.bytes" $size) -}}
{{- if and (not $cache.persistence.enabled) (gt (include "galley.bytes" $size | int64) (include "galley.bytes" $cache.sizeLimit | int64)) -}}
{{- fail (printf "modelCache.sizeLimit: must be at least %s (%s), got %s; or set modelCache.persistence.enabled" $name (include "galley.text" $size) (include "galley.text" $cache.sizeLimit)) -}}
{{- end -}}
{{- end -}}
{{- if and $cache.persistence.enabled (not $cache.persistence.existingClaim) (gt $total (include "galley.bytes" $cache.persistence.size | int64)) -}}
{{- fail (printf "modelCache.persistence.size: must be at least the sum of %s (%d bytes), got %s" (keys $sizes | sortAlpha | join " and ") $total (include "galley.text" $cache.persistence.size)) -}}
{{- end -}}
{{- end -}}
