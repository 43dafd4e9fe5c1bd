{{/* The common parts of all pods. */}}

{{/* Security contexts of all pods and containers; galley.extensions lays those of a role over them. */}}
{{- define "galley.podSecurity" -}}
{{ include "galley.over" (dict "text" "{}" "over" (list .root.Values.podSecurityContext)) }}
{{- end -}}

{{- define "galley.containerSecurity" -}}
{{ include "galley.over" (dict "text" "{}" "over" (list .root.Values.securityContext)) }}
{{- end -}}

{{/* The roles that have a service account; Ray's head and `helm test` use that of another role, their `account`. */}}
{{- define "galley.accountRoles" -}}
- gateway
{{- if .Values.draft.enabled }}
- draft
{{- end }}
- target
{{- if .Values.learning.enabled }}
- learning
{{- end }}
{{- if .Values.redis.embedded.enabled }}
- redis
{{- end }}
{{- end -}}

{{/* The role's values of its account. (dict "root" $ "role" "redis") */}}
{{- define "galley.accountValues" -}}
{{- $values := .root.Values -}}
{{- $own := ternary $values.redis.embedded (index $values .role) (eq .role "redis") -}}
{{- toYaml ($own.serviceAccount | default dict) -}}
{{- end -}}

{{- define "galley.createsAccount" -}}
{{- $own := include "galley.accountValues" . | fromYaml -}}
{{- if and .root.Values.serviceAccount.create (dig "create" true $own) }}true{{ end -}}
{{- end -}}

{{- define "galley.serviceAccountName" -}}
{{- $it := dict "root" .root "role" (.account | default .role) -}}
{{- $name := (include "galley.accountValues" $it | fromYaml).name -}}
{{- $name | default (ternary (include "galley.roleName" $it) "default" (eq "true" (include "galley.createsAccount" $it))) -}}
{{- end -}}

{{/*
Time that Kubernetes waits before SIGKILL, in seconds: the delay before SIGTERM, the drain, and 15 s to end the last
calls (0.5 s), withdraw the lease, and send the remaining spans and metrics (3 s).
*/}}
{{- define "galley.gracePeriod" -}}
{{- $role := .values -}}
{{- add $role.preStopSeconds $role.drainTimeoutSeconds 15 -}}
{{- end -}}

{{/* Settings of pods that do not call the Kubernetes API. */}}
{{- define "galley.podCommon" -}}
serviceAccountName: {{ include "galley.serviceAccountName" . }}
automountServiceAccountToken: false
# Otherwise Kubernetes sets GALLEY_GATEWAY_PORT=tcp://... for the Service of that name, which the
# gateway would read as its setting.
enableServiceLinks: false
securityContext:
  {{- include "galley.podSecurity" . | nindent 2 }}
{{- $secrets := list }}
{{- range concat ((.root.Values.global).imagePullSecrets | default list) .root.Values.imagePullSecrets }}
{{- $secrets = append $secrets (ternary . (dict "name" .) (kindIs "map" .)) }}
{{- end }}
{{- with $secrets | uniq }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Placement of a role's pods. A constraint without labelSelector applies to the role's pods. */}}
{{- define "galley.placement" -}}
{{- $it := . -}}
{{- $role := .values -}}
{{- with $role.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $role.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $role.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $role.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $role.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  {{- $own := dict "labelSelector" (dict "matchLabels" (include "galley.selector" $it | fromYaml)) }}
  - {{ toYaml (merge (deepCopy .) $own) | nindent 4 | trim }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* True if these values put a pod into its node's network. */}}
{{- define "galley.onHostNetwork" -}}
{{- if or .hostNetwork (.podSpec).hostNetwork }}true{{ end -}}
{{- end -}}

{{/* Metadata of a role's pods; `silent` for pods without metrics, `bare` also without a note for kubectl. */}}
{{- define "galley.podMetadata" -}}
labels:
  {{- include "galley.podLabels" . | nindent 2 }}
{{- if not .bare }}
annotations:
  # Default container of kubectl logs and exec.
  kubectl.kubernetes.io/default-container: {{ .container | default .role }}
  {{- if and (eq .root.Values.monitoring.scrape "annotations") (not .silent) }}
  prometheus.io/scrape: "true"
  prometheus.io/port: {{ .values.metricsPort | quote }}
  prometheus.io/path: /metrics
  {{- end }}
{{- end }}
{{- end -}}

{{/* The part of a pod before its containers. */}}
{{- define "galley.podHead" -}}
{{ include "galley.podCommon" . }}
terminationGracePeriodSeconds: {{ include "galley.gracePeriod" . }}
{{- include "galley.placement" . }}
{{- end -}}

{{/*
Probes by grpc.health.v1, on a port of its own without TLS, because gRPC probes of the kubelet cannot use TLS.
NetworkPolicies never block the kubelet of a pod's own node.
*/}}
{{- define "galley.probes" -}}
startupProbe:
  grpc: {port: {{ .port }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: {{ div (add .startupSeconds 1) 2 }}
readinessProbe:
  grpc: {port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
# Fails only after a minute, because a restart loses all caches. The kubelet does not run it while a pod drains.
livenessProbe:
  grpc: {port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{/* Time limit of a roll-out: 10 minutes for node and image, plus the start-up time limit. */}}
{{- define "galley.progressSeconds" -}}
{{- add .startupSeconds 600 -}}
{{- end -}}

{{- define "galley.ports" -}}
{{- $role := .values -}}
- {name: grpc, containerPort: {{ $role.port }}, protocol: TCP}
- {name: health, containerPort: {{ $role.healthPort }}, protocol: TCP}
- {name: metrics, containerPort: {{ $role.metricsPort }}, protocol: TCP}
{{- if and (eq .role "gateway") (include "galley.hasHttp" .root) }}
- {name: http, containerPort: {{ $role.httpPort }}, protocol: TCP}
{{- end }}
{{- end -}}

{{/* Requests and limits, with the role's GPUs. */}}
{{- define "galley.resources" -}}
{{- $role := .values -}}
{{- $resources := deepCopy $role.resources -}}
{{- if $role.gpus -}}
{{- $limits := merge (dict $role.gpuResource (int $role.gpus)) ($resources.limits | default dict) -}}
{{- $resources = merge (dict "limits" $limits) $resources -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* The part of a container beside environment and probes; `container` is its name. */}}
{{- define "galley.container" -}}
name: {{ .container | default .role }}
image: {{ include "galley.image" . }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- include "galley.containerSecurity" . | nindent 2 }}
resources:
  {{- include "galley.resources" . | nindent 2 }}
volumeMounts:
  {{- include "galley.mounts" . | nindent 2 }}
{{- end -}}

{{/* Delay before SIGTERM, so that the pod leaves the endpoints before it refuses calls. */}}
{{- define "galley.lifecycle" -}}
{{- with .values.preStopSeconds }}
lifecycle:
  preStop:
    sleep: {seconds: {{ . }}}
{{- end }}
{{- end -}}
