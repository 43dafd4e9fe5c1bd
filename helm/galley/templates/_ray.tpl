{{/* Targets managed by Ray Serve on a cluster that KubeRay creates. */}}

{{/* The Serve config (like deploy/ray/target.yaml). Replicas read other settings from their pod's environment. */}}
{{- define "galley.serveConfig" -}}
{{- $target := .Values.target -}}
{{- $settings := dict "host" "0.0.0.0" "port" (int $target.port) "drain_timeout_s" (int $target.drainTimeoutSeconds) -}}
{{- $_ := set $settings "threads" (int ($target.settings.threads | default 1)) -}}
{{- $_ := set $settings "device" ($target.settings.device | default (ternary "cuda" "cpu" (gt (int $target.gpus) 0))) -}}
proxy_location: Disabled # requests do not pass through Ray
applications:
  - name: galley-target
    route_prefix: null
    import_path: services.target.ray.app:app
    args:
      tensor_parallel: {{ $target.tensorParallel }}
      settings:
        {{- toYaml $settings | nindent 8 }}
    deployments:
      - name: TargetReplica
        # One replica in each worker pod.
        num_replicas: {{ $target.replicas }}
{{- end -}}

{{/* Environment of all Ray processes. */}}
{{- define "galley.rayEnv" -}}
# The time that Serve gives a replica to drain; Ray's default is 30 s.
- name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
  value: {{ add .root.Values.target.drainTimeoutSeconds 10 | quote }}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: RAY_DEDUP_LOGS
  value: "0"
- name: RAY_COLOR_PREFIX
  value: "0"
- name: RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD
  value: "1"
- name: RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S
  value: "1"
{{- end -}}

{{/* The pod of Ray's head: Serve's controller and no replica. */}}
{{- define "galley.rayHead" -}}
{{- $values := .root.Values -}}
metadata:
  labels:
    {{- include "galley.podLabels" (dict "root" .root "role" "ray-head") | nindent 4 }}
spec:
  {{- include "galley.podCommon" . | nindent 2 }}
  terminationGracePeriodSeconds: {{ include "galley.gracePeriod" . }}
  {{- with $values.target.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $values.target.rayService.head.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.target.rayService.head.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: ray-head
      image: {{ include "galley.image" . }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext:
        {{- include "galley.containerSecurity" . | nindent 8 }}
      resources:
        {{- toYaml $values.target.rayService.head.resources | nindent 8 }}
      ports:
        - {name: gcs-server, containerPort: 6379, protocol: TCP}
        - {name: dashboard, containerPort: 8265, protocol: TCP}
        - {name: client, containerPort: 10001, protocol: TCP}
        # Nothing listens at this port, but KubeRay needs one of this name to report a RayService as ready.
        - {name: serve, containerPort: 8000, protocol: TCP}
      env:
        {{- include "galley.rayEnv" . | nindent 8 }}
      # Ray has no gRPC health service; its agents answer HTTP.
      startupProbe:
        httpGet: {path: /api/gcs_healthz, port: dashboard}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 60
      readinessProbe:
        httpGet: {path: /api/gcs_healthz, port: dashboard}
        periodSeconds: 5
        timeoutSeconds: 3
      livenessProbe:
        httpGet: {path: /api/gcs_healthz, port: dashboard}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: {{ $values.target.rayService.scratchSizeLimit }}}
{{- end -}}

{{/* The pods of the replicas, one each. */}}
{{- define "galley.rayWorker" -}}
{{- $target := .root.Values.target -}}
{{- $it := merge (dict "scratch" $target.rayService.scratchSizeLimit) . -}}
metadata:
  {{- include "galley.podMetadata" $it | nindent 2 }}
spec:
  {{- include "galley.podHead" $it | nindent 2 }}
  {{- include "galley.download" (merge (dict "model" .root.Values.model) $it) | nindent 2 }}
  containers:
    - {{ include "galley.container" $it | nindent 6 | trim }}
      ports:
        {{- include "galley.ports" $it | nindent 8 }}
        - {name: ray-agent, containerPort: 52365, protocol: TCP}
      env:
        {{- include "galley.targetEnv" $it | nindent 8 }}
        {{- include "galley.rayEnv" $it | nindent 8 }}
      # Liveness is that of the Ray node, because Serve restarts replicas. Readiness is that of the replica.
      startupProbe:
        httpGet: {path: /api/local_raylet_healthz, port: ray-agent}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 60
      readinessProbe:
        grpc: {port: {{ $target.healthPort }}}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: 2
      livenessProbe:
        httpGet: {path: /api/local_raylet_healthz, port: ray-agent}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      {{- include "galley.lifecycle" $it | nindent 6 }}
  volumes:
    {{- include "galley.volumes" $it | nindent 4 }}
{{- end -}}
