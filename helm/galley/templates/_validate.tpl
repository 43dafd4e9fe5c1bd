{{/*
Refuse combinations of values that cannot work, and say what to change. values.schema.json refuses unknown keys, and values out
of bounds.
*/}}
{{- define "galley.validate" -}}
{{- include "galley.validateStore" . -}}
{{- include "galley.validateStoreUrl" . -}}
{{- include "galley.validateModels" . -}}
{{- include "galley.validatePools" . -}}
{{- include "galley.validateLearning" . -}}
{{- include "galley.validateTarget" . -}}
{{- include "galley.validateEngine" . -}}
{{- include "galley.validateDevices" . -}}
{{- include "galley.validateScaling" . -}}
{{- include "galley.validateMonitoring" . -}}
{{- include "galley.validateAccess" . -}}
{{- include "galley.validateEdge" . -}}
{{- include "galley.validatePods" . -}}
{{- end -}}

{{- define "galley.validateStore" -}}
{{- $redis := .Values.redis -}}
{{- $ways := list -}}
{{- if $redis.url }}{{ $ways = append $ways "redis.url" }}{{ end -}}
{{- if $redis.existingSecret.name }}{{ $ways = append $ways "redis.existingSecret.name" }}{{ end -}}
{{- if $redis.embedded.enabled }}{{ $ways = append $ways "redis.embedded.enabled" }}{{ end -}}
{{- if ne (len $ways) 1 -}}
{{- fail (printf "redis: must have exactly one of redis.url, redis.existingSecret.name and redis.embedded.enabled set, got %s" (join ", " $ways | default "none")) -}}
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
{{- fail (printf "networkPolicy.redis.ports: must contain port %s of redis.url, got %s" $port (join ", " $policy.redis.ports)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "galley.validateTarget" -}}
{{- $target := .Values.target -}}
{{- $nodes := int $target.nodes -}}
{{- $ranks := int $target.tensorParallel -}}
{{- $gpus := int $target.gpus -}}
{{- $ofSeveral := eq $target.kind "leaderworkerset" -}}
{{- if and $ofSeveral (lt $nodes 2) -}}
{{- fail (printf "target.nodes: must be 2 or more with target.kind leaderworkerset, got %d; or set target.kind to statefulset" $nodes) -}}
{{- end -}}
{{- if and (not $ofSeveral) (gt $nodes 1) -}}
{{- fail (printf "target.nodes: must be 1, got %d; only target.kind leaderworkerset uses several nodes" $nodes) -}}
{{- end -}}
{{- if and $target.maxSurge (not (has $target.kind (list "deployment" "leaderworkerset"))) -}}
{{- fail (printf "target.maxSurge: must be 0 with target.kind %s, got %v; set target.kind to deployment" $target.kind $target.maxSurge) -}}
{{- end -}}
{{- if and $target.exclusiveTopology (not $ofSeveral) -}}
{{- fail (printf "target.exclusiveTopology: must be empty with target.kind %s, got %s; only target.kind leaderworkerset uses several nodes" $target.kind $target.exclusiveTopology) -}}
{{- end -}}
{{- if mod $ranks $nodes -}}
{{- fail (printf "target.tensorParallel: must be a multiple of target.nodes (%d), got %d; every node runs the same number of ranks" $nodes $ranks) -}}
{{- end -}}
{{- if and $gpus (ne (mul $gpus $nodes) $ranks) -}}
{{- fail (printf "target.gpus: must be %d (target.tensorParallel %d / target.nodes %d, one GPU for each rank of a pod), got %d" (div $ranks $nodes) $ranks $nodes $gpus) -}}
{{- end -}}
{{- if contains "@" (dig "redisAddress" "" ($target.rayService.gcsFaultTolerance | default dict)) -}}
{{- fail "target.rayService.gcsFaultTolerance.redisAddress: must hold no user or password, because manifests show it; name the password's Secret in redisPassword" -}}
{{- end -}}
{{- if and (eq $target.kind "rayservice") (lt (int $target.replicas) 1) -}}
{{- fail "target.replicas: must be 1 or more with target.kind rayservice, got 0" -}}
{{- end -}}
{{- $budget := $target.podDisruptionBudget -}}
{{- if and (eq $target.kind "rayservice") (kindIs "string" ($budget.minAvailable | default $budget.maxUnavailable)) -}}
{{- fail (printf "target.podDisruptionBudget: must be a number of pods with target.kind rayservice, got %s; Kubernetes does not know their total" ($budget.minAvailable | default $budget.maxUnavailable)) -}}
{{- end -}}
{{- end -}}

{{- define "galley.validateEngine" -}}
{{- $target := .Values.target -}}
{{- $name := regexReplaceAll "^.*/" $target.image.repository "" -}}
{{- if eq $target.engine "paged" -}}
{{- if $target.vllmArgs -}}
{{- fail "target.vllmArgs: must be empty with target.engine paged; set target.engine to vllm" -}}
{{- end -}}
{{- if hasPrefix "galley-target-vllm" $name -}}
{{- fail (printf "target.engine: must be vllm with target.image.repository %s, got paged" $name) -}}
{{- end -}}
{{- else -}}
{{- if not (has $target.kind (list "statefulset" "deployment")) -}}
{{- fail (printf "target.kind: must be statefulset or deployment with target.engine vllm, got %s" $target.kind) -}}
{{- end -}}
{{- if has $name (list "galley-target" "galley-target-cuda") -}}
{{- fail (printf "target.image.repository: must be an image with vLLM with target.engine vllm, such as galley-target-vllm%s, got %s" (trimPrefix "galley-target" $name) $name) -}}
{{- end -}}
{{- if ne ($target.settings.quantization | default "none") "none" -}}
{{- fail (printf "target.settings.quantization: must be none with target.engine vllm, got %s; name that of vLLM in target.vllmArgs" $target.settings.quantization) -}}
{{- end -}}
{{- if $target.settings.invariant -}}
{{- fail "target.settings.invariant: must be false with target.engine vllm; set VLLM_BATCH_INVARIANT=1 in target.extraEnv" -}}
{{- end -}}
{{- range $argument, $value := dict "tensor_parallel_size" "target.tensorParallel" "max_num_seqs" "target.settings.max_sessions" "kv_cache_memory_bytes" "target.settings.kv_memory_mb" -}}
{{- if hasKey $target.vllmArgs $argument -}}
{{- fail (printf "target.vllmArgs.%s: must not be set; set %s" $argument $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "galley.validateDevices" -}}
{{- range include "galley.pools" . | fromJsonArray -}}
{{- $path := .path -}}
{{- $gpus := int .values.gpus -}}
{{- $device := .values.settings.device | default "" -}}
{{- if and $gpus (eq $device "cpu") -}}
{{- fail (printf "%s.settings.device: must be cuda or unset with %s.gpus %d, got cpu" $path $path $gpus) -}}
{{- end -}}
{{- if and (not $gpus) (hasPrefix "cuda" $device) (not .values.resourceClaims) -}}
{{- fail (printf "%s.gpus: must be 1 or more with %s.settings.device %s, got 0; or set %s.resourceClaims" $path $path $device $path) -}}
{{- end -}}
{{- if and (eq .role "draft") $gpus (not .values.settings.model) -}}
{{- fail (printf "%s.gpus: must be 0 without %s.settings.model, got %d; only a draft model uses a GPU" $path $path $gpus) -}}
{{- end -}}
{{- end -}}
{{- $target := .Values.target -}}
{{- $limit := dig "limits" "memory" "" $target.resources -}}
{{- $pool := int64 $target.settings.kv_memory_mb -}}
{{- $ranks := div (int $target.tensorParallel) (int $target.nodes) -}}
{{- $onCpu := not (or (int $target.gpus) $target.resourceClaims (hasPrefix "cuda" ($target.settings.device | default ""))) -}}
{{- /* Containers of podSpec may have another limit. */ -}}
{{- if and $onCpu $limit (not (dig "containers" "" ($target.podSpec | default dict))) (ge (mul $pool $ranks 1048576) (include "galley.bytes" $limit | int64)) -}}
{{- fail (printf "target.settings.kv_memory_mb: must be less than target.resources.limits.memory (%v) for each of the %d ranks of a pod with target.gpus 0, got %d; lower it or raise the limit" $limit $ranks $pool) -}}
{{- end -}}
{{- if and (contains "/mig-" $target.gpuResource) (gt (int $target.tensorParallel) 1) -}}
{{- fail (printf "target.tensorParallel: must be 1 with target.gpuResource %s, got %v; ranks cannot exchange data between slices of a GPU" $target.gpuResource $target.tensorParallel) -}}
{{- end -}}
{{- end -}}

{{- define "galley.validateMonitoring" -}}
{{- $monitoring := .Values.monitoring -}}
{{- if and $monitoring.rules.enabled (eq $monitoring.scrape "none") (not $monitoring.releaseLabel) -}}
{{- fail "monitoring.scrape: must not be none with monitoring.rules.enabled, because the alert on missing metrics would fire; or name the label that your own scrape sets in monitoring.releaseLabel" -}}
{{- end -}}
{{- range $severity, $burn := $monitoring.rules.burnRates -}}
{{- if ge (include "galley.milliseconds" $burn.shortWindow | int64) (include "galley.milliseconds" $burn.window | int64) -}}
{{- fail (printf "monitoring.rules.burnRates.%s.shortWindow: must be shorter than window (%s), got %s" $severity $burn.window $burn.shortWindow) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "galley.validateScaling" -}}
{{- $keda := .Values.keda -}}
{{- if $keda.enabled -}}
{{- if not $keda.prometheus.serverAddress -}}
{{- fail "keda.prometheus.serverAddress: must be set with keda.enabled, such as http://prometheus.monitoring:9090" -}}
{{- end -}}
{{- range include "galley.pools" . | fromJsonArray -}}
{{- $scaling := include "galley.kedaOf" (merge (dict "root" $) .) | fromJson -}}
{{- if and $scaling.enabled (dig "autoscaling" "enabled" false .values) -}}
{{- fail (printf "keda.%s.enabled: must be false with %s.autoscaling.enabled, because both scale the %s pool; disable one" .role .path .role) -}}
{{- end -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- $at := ternary (printf "%s.keda" .path) (printf "keda.%s" .role) (hasKey .values "keda") -}}
{{- fail (printf "%s.minReplicas: must be at most %s.maxReplicas (%v), got %v" $at $at $scaling.maxReplicas $scaling.minReplicas) -}}
{{- end -}}
{{- if or (and .values.name $scaling.enabled) (and .component (not $.Values.drafts) $keda.draft.enabled) -}}
{{- /* Kubernetes cuts what precedes the random part of a pod's name to 58 characters, of which a hash and two dashes take 12. */}}
{{- $name := include "galley.roleName" (merge (dict "root" $) .) -}}
{{- if gt (len $name) 46 -}}
{{- $at := ternary "draft.canary.enabled" (printf "%s.name" .path) (hasKey . "component") -}}
{{- fail (printf "%s: must give objects a name of at most 46 characters with keda.enabled, got %s; shorten it or set fullnameOverride" $at $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.monitoring.scrape "none" -}}
{{- fail "monitoring.scrape: must not be none with keda.enabled, because KEDA queries Prometheus for the metrics of the pods" -}}
{{- end -}}
{{- if and $keda.target.enabled (eq .Values.target.kind "rayservice") -}}
{{- fail "keda.target.enabled: must be false with target.kind rayservice, which has no scale subresource; set keda.target.enabled=false" -}}
{{- end -}}
{{- end -}}
{{- range include "galley.pools" . | fromJsonArray -}}
{{- $one := .values.autoscaling | default dict -}}
{{- if and $one.enabled (gt (int $one.minReplicas) (int $one.maxReplicas)) -}}
{{- fail (printf "%s.autoscaling.minReplicas: must be at most %s.autoscaling.maxReplicas (%v), got %v" .path .path $one.maxReplicas $one.minReplicas) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "galley.validateAccess" -}}
{{- $values := .Values -}}
{{- $outside := list -}}
{{- if $values.ingress.enabled }}{{ $outside = append $outside "ingress.enabled" }}{{ end -}}
{{- if $values.gatewayApi.enabled }}{{ $outside = append $outside "gatewayApi.enabled" }}{{ end -}}
{{- if $values.inferencePool.enabled }}{{ $outside = append $outside "inferencePool.enabled" }}{{ end -}}
{{- if ne $values.gateway.service.type "ClusterIP" }}{{ $outside = append $outside (printf "gateway.service.type %s" $values.gateway.service.type) }}{{ end -}}
{{- if and $outside $values.networkPolicy.enabled (not $values.networkPolicy.clients) -}}
{{- fail (printf "networkPolicy.clients: must name callers with %s; empty admits this namespace only. Name the ingress controller's namespace or an ipBlock" (join " and " $outside)) -}}
{{- end -}}
{{- $jwt := $values.auth.jwt -}}
{{- if and $jwt.enabled (not (hasPrefix "https://" $jwt.issuer)) -}}
{{- fail (printf "auth.jwt.issuer: must begin with https:// with auth.jwt.enabled, got %s" ($jwt.issuer | default "none")) -}}
{{- end -}}
{{- if and $jwt.enabled (not $jwt.audience) -}}
{{- fail "auth.jwt.audience: must be set with auth.jwt.enabled; without it, tokens issued for other services would be accepted" -}}
{{- end -}}
{{- if and $jwt.enabled $jwt.jwksUrl $jwt.jwksConfigMap.name -}}
{{- fail "auth.jwt: must not have both jwksUrl and jwksConfigMap.name; set one, or neither for OpenID Connect discovery" -}}
{{- end -}}
{{- $gateway := $values.gateway -}}
{{- if has (int $gateway.httpPort) (list (int $gateway.port) (int $gateway.healthPort) (int $gateway.metricsPort)) -}}
{{- fail (printf "gateway.httpPort: must differ from the other ports of the gateway, got %v" $gateway.httpPort) -}}
{{- end -}}
{{- range $role := list "gateway" "draft" "target" -}}
{{- $one := index $values $role -}}
{{- if ne (len (uniq (list (int $one.port) (int $one.healthPort) (int $one.metricsPort)))) 3 -}}
{{- fail (printf "%s.port, %s.healthPort, %s.metricsPort: must differ, got %v, %v and %v" $role $role $role $one.port $one.healthPort $one.metricsPort) -}}
{{- end -}}
{{- end -}}
{{- end -}}
