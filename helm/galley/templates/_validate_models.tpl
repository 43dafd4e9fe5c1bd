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
{{- if and $sources (or (has $volume.mountPath (list "/tmp" "/var/cache/galley" "/dev/shm")) (hasPrefix "/etc/galley" $volume.mountPath)) -}}
{{- fail (printf "modelVolume.mountPath: must not be %s, where pods have another volume" $volume.mountPath) -}}
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
{{- include "galley.validateModelImages" . -}}
{{- include "galley.validateModelSizes" . -}}
{{- end -}}

{{/* Refuse images whose model nobody reads. */}}
{{- define "galley.validateModelImages" -}}
{{- $paths := list -}}
{{- range include "galley.pools" . | fromJsonArray -}}
{{- $hub := include "galley.hubModel" (merge (dict "root" $) .) -}}
{{- if and .values.modelImage $hub -}}
{{- fail (printf "%s.modelImage: must be empty with the hub id %s; name the directory at %s" .path $hub $.Values.modelVolume.mountPath) -}}
{{- end -}}
{{- if not $hub -}}{{- $paths = append $paths .path -}}{{- end -}}
{{- end -}}
{{- if and .Values.modelImage (not $paths) -}}
{{- fail (printf "modelImage: must be empty with hub ids as models, got %s; name the directory at %s in model" .Values.model .Values.modelVolume.mountPath) -}}
{{- end -}}
{{- end -}}

{{/* A hub id without its revision. */}}
{{- define "galley.unpinned" -}}
{{- regexReplaceAll "@.*$" . "" -}}
{{- end -}}

{{/* The hub models whose size is told, as JSON: of each id its size in bytes, as text, and the value that tells it. */}}
{{- define "galley.modelSizes" -}}
{{- $told := list (dict "id" .Values.model "name" "modelSize" "size" .Values.modelSize) -}}
{{- range include "galley.draftPools" . | fromJsonArray -}}
{{- $told = append $told (dict "id" (.values.settings.model | default "") "name" (printf "%s.modelSize" .path) "size" .values.modelSize) -}}
{{- end -}}
{{- $sizes := dict -}}
{{- range $told -}}
{{- $id := include "galley.unpinned" .id -}}
{{- $bytes := include "galley.bytes" .size | int64 -}}
{{- if and (include "galley.isHubId" $id) (gt $bytes (dig $id "bytes" 0 $sizes | int64)) -}}
{{- $_ := set $sizes $id (dict "name" .name "text" (include "galley.text" .size) "bytes" $bytes) -}}
{{- end -}}
{{- end -}}
{{- toJson $sizes -}}
{{- end -}}

{{/* The sum of sizes, as JSON: bytes, and names for a person. */}}
{{- define "galley.sumOfSizes" -}}
{{- $bytes := 0 -}}
{{- $names := list -}}
{{- range . -}}{{- $bytes = add $bytes (int64 .bytes) -}}{{- $names = append $names .name -}}{{- end -}}
{{- dict "bytes" $bytes "names" ($names | sortAlpha | join " and ") | toJson -}}
{{- end -}}

{{/* Refuse a cache that cannot hold the hub models whose size is told: a claim has those of all pods, a pod its own. */}}
{{- define "galley.validateModelSizes" -}}
{{- $cache := .Values.modelCache -}}
{{- $sizes := include "galley.modelSizes" . | fromJson -}}
{{- $all := include "galley.sumOfSizes" (values $sizes) | fromJson -}}
{{- if and $cache.persistence.enabled (not $cache.persistence.existingClaim) (gt (int64 $all.bytes) (include "galley.bytes" $cache.persistence.size | int64)) -}}
{{- fail (printf "modelCache.persistence.size: must be at least the sum of %s (%d bytes), got %s" $all.names (int64 $all.bytes) (include "galley.text" $cache.persistence.size)) -}}
{{- end -}}
{{- range include "galley.pools" . | fromJsonArray -}}
{{- $own := list -}}
{{- if or (eq .role "target") (and (eq .role "draft") (or .values.settings.model .values.settings.target_model)) -}}
{{- range include "galley.hubModelsOf" (merge (dict "root" $) .) | fromJsonArray -}}
{{- with get $sizes (include "galley.unpinned" .) -}}{{- $own = append $own . -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- $sum := include "galley.sumOfSizes" $own | fromJson -}}
{{- if and (not $cache.persistence.enabled) (gt (int64 $sum.bytes) (include "galley.bytes" $cache.sizeLimit | int64)) -}}
{{- $size := ternary (first $own | default dict).text (printf "%d bytes" (int64 $sum.bytes)) (eq (len $own) 1) -}}
{{- fail (printf "modelCache.sizeLimit: must be at least %s (%s), got %s; or set modelCache.persistence.enabled" $sum.names $size (include "galley.text" $cache.sizeLimit)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
