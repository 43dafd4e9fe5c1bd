{{/*
Refuse combinations of values that cannot work, and say what to change. values.schema.json refuses unknown keys, values out
of bounds, and missing requirements of an enabled part.
*/}}
{{- define "galley.validate" -}}
{{- include "galley.validateStore" . -}}
{{- include "galley.validateStoreUrl" . -}}
{{- include "galley.validateModels" . -}}
{{- include "galley.validateTarget" . -}}
{{- include "galley.validateDevices" . -}}
{{- include "galley.validateScaling" . -}}
{{- include "galley.validateAccess" . -}}
{{- end -}}

{{- define "galley.validateStore" -}}
{{- $redis := .Values.redis -}}
{{- $ways := list -}}
{{- if $redis.url }}{{ $ways = append $ways "redis.url" }}{{ end -}}
{{- if $redis.existingSecret.name }}{{ $ways = append $ways "redis.existingSecret.name" }}{{ end -}}
{{- if $redis.embedded.enabled }}{{ $ways = append $ways "redis.embedded.enabled" }}{{ end -}}
{{- if ne (len $ways) 1 -}}
{{- fail (printf "set exactly one of redis.url, redis.existingSecret.name and redis.embedded.enabled; set: %s" (join ", " $ways | default "none")) -}}
{{- end -}}
{{- end -}}

{{/* Refuse secrets in manifests, and policies that close the store's port. */}}
{{- define "galley.validateStoreUrl" -}}
{{- $url := .Values.redis.url -}}
{{- if or (contains "@" $url) (contains "sentinel_password=" $url) -}}
{{- fail "redis.url: must hold no user or password, because manifests show it; put the URL into a Secret and name it in redis.existingSecret.name" -}}
{{- end -}}
{{- $policy := .Values.networkPolicy -}}
{{- if and $url $policy.enabled -}}
{{- $known := ternary 26379 6379 (contains "+sentinel:" $url) -}}
{{- range splitList "," (regexReplaceAll "^[^:]+://([^/?]*).*$" $url "${1}") -}}
{{- $port := include "galley.portOf" (dict "address" . "default" $known) -}}
{{- if not (has $port (splitList " " (join " " $policy.redis.ports))) -}}
{{- fail (printf "redis.url: port %s, which networkPolicy.redis.ports (%s) does not open; add it there" $port (join ", " $policy.redis.ports)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "galley.validateModels" -}}
{{- $values := .Values -}}
{{- if and $values.draft.enabled (not $values.draft.settings.model) (include "galley.isHubId" $values.model) -}}
{{- fail "model: must be a directory, because a draft without a model takes the tokenizer from it; or set draft.settings.model or draft.enabled=false" -}}
{{- end -}}
{{- if and $values.modelCache.download.enabled (not (include "galley.isHubId" $values.model)) (not (include "galley.isHubId" $values.draft.settings.model)) -}}
{{- fail "modelCache.download.enabled: nothing to download, because neither model nor draft.settings.model is a hub id" -}}
{{- end -}}
{{- end -}}

{{- define "galley.validateTarget" -}}
{{- $target := .Values.target -}}
{{- $nodes := int $target.nodes -}}
{{- $ranks := int $target.tensorParallel -}}
{{- $gpus := int $target.gpus -}}
{{- $ofSeveral := eq $target.kind "leaderworkerset" -}}
{{- if and $ofSeveral (lt $nodes 2) -}}
{{- fail "target.kind: leaderworkerset needs several pods per replica; set target.nodes to 2 or more, or target.kind to statefulset" -}}
{{- end -}}
{{- if and (not $ofSeveral) (gt $nodes 1) -}}
{{- fail (printf "target.nodes: must be 1, got %d; only target.kind leaderworkerset uses several nodes" $nodes) -}}
{{- end -}}
{{- if mod $ranks $nodes -}}
{{- fail (printf "target.tensorParallel: %d is not divided by target.nodes %d; every node runs the same number of ranks" $ranks $nodes) -}}
{{- end -}}
{{- if and $gpus (ne (mul $gpus $nodes) $ranks) -}}
{{- fail (printf "target.gpus: %d in each of %d pod(s), but target.tensorParallel is %d; each rank takes one GPU, so %d of them would %s" $gpus $nodes $ranks (mul $gpus $nodes) (ternary "not do" "leave some idle" (lt (mul $gpus $nodes) $ranks))) -}}
{{- end -}}
{{- if and (eq $target.kind "rayservice") (lt (int $target.replicas) 1) -}}
{{- fail "target.kind: rayservice needs target.replicas of 1 or more" -}}
{{- end -}}
{{- $budget := $target.podDisruptionBudget -}}
{{- if and (eq $target.kind "rayservice") (kindIs "string" ($budget.minAvailable | default $budget.maxUnavailable)) -}}
{{- fail "target.podDisruptionBudget is a share; with target.kind rayservice set a number of pods, because Kubernetes does not know their total" -}}
{{- end -}}
{{- end -}}

{{- define "galley.validateDevices" -}}
{{- range $role := list "draft" "target" -}}
{{- $one := index $.Values $role -}}
{{- $gpus := int $one.gpus -}}
{{- $device := $one.settings.device | default "" -}}
{{- if and $gpus (eq $device "cpu") -}}
{{- fail (printf "%s.settings.device is cpu, but %s.gpus is %d; change one" $role $role $gpus) -}}
{{- end -}}
{{- if and (not $gpus) (hasPrefix "cuda" $device) -}}
{{- fail (printf "%s.settings.device is %s, but %s.gpus is 0; pods without GPUs would not start" $role $device $role) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.draft.enabled (int .Values.draft.gpus) (not .Values.draft.settings.model) -}}
{{- fail "draft.gpus without draft.settings.model: a draft without a model uses no GPU" -}}
{{- end -}}
{{- end -}}

{{- define "galley.validateScaling" -}}
{{- $keda := .Values.keda -}}
{{- if $keda.enabled -}}
{{- if and $keda.draft.enabled .Values.draft.autoscaling.enabled -}}
{{- fail "keda.draft.enabled and draft.autoscaling.enabled would both scale the draft pool; disable one" -}}
{{- end -}}
{{- if eq .Values.monitoring.scrape "none" -}}
{{- fail "monitoring.scrape: must not be none with keda.enabled; KEDA queries Prometheus, which would know nothing" -}}
{{- end -}}
{{- if and $keda.target.enabled (eq .Values.target.kind "rayservice") -}}
{{- fail "keda.target.enabled: cannot scale target.kind rayservice, which has no scale subresource; set keda.target.enabled=false" -}}
{{- end -}}
{{- range $role := list "draft" "target" -}}
{{- $one := index $keda $role -}}
{{- if gt (int $one.minReplicas) (int $one.maxReplicas) -}}
{{- fail (printf "keda.%s.minReplicas %v is above keda.%s.maxReplicas %v" $role $one.minReplicas $role $one.maxReplicas) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $role := list "gateway" "draft" -}}
{{- $one := (index $.Values $role).autoscaling -}}
{{- if and $one.enabled (gt (int $one.minReplicas) (int $one.maxReplicas)) -}}
{{- fail (printf "%s.autoscaling.minReplicas %v is above %s.autoscaling.maxReplicas %v" $role $one.minReplicas $role $one.maxReplicas) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "galley.validateAccess" -}}
{{- $values := .Values -}}
{{- $outside := list -}}
{{- if $values.ingress.enabled }}{{ $outside = append $outside "ingress.enabled" }}{{ end -}}
{{- if $values.gatewayApi.enabled }}{{ $outside = append $outside "gatewayApi.enabled" }}{{ end -}}
{{- if ne $values.gateway.service.type "ClusterIP" }}{{ $outside = append $outside (printf "gateway.service.type %s" $values.gateway.service.type) }}{{ end -}}
{{- if and $outside $values.networkPolicy.enabled (not $values.networkPolicy.clients) -}}
{{- fail (printf "networkPolicy.clients: must name callers with %s; empty admits this namespace only. Name the ingress controller's namespace or an ipBlock" (join " and " $outside)) -}}
{{- end -}}
{{- $jwt := $values.auth.jwt -}}
{{- if and $jwt.enabled $jwt.jwksUrl $jwt.jwksConfigMap.name -}}
{{- fail "auth.jwt: set jwksUrl or jwksConfigMap.name, or neither for OpenID Connect discovery" -}}
{{- end -}}
{{- range $role := list "gateway" "draft" "target" -}}
{{- $one := index $values $role -}}
{{- if ne (len (uniq (list $one.port $one.healthPort $one.metricsPort))) 3 -}}
{{- fail (printf "%s.port, %s.healthPort and %s.metricsPort must differ" $role $role $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}
