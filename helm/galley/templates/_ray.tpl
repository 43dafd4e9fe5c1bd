{{/* Targets managed by Ray Serve on a cluster that KubeRay creates. */}}

{{/* The Serve config (like deploy/ray/target.yaml). Replicas read other settings from their pod's environment. */}}
{{- define "galley.serveConfig" -}}
{{- $target := .Values.target -}}
{{- $settings := dict "host" "::" "port" (int $target.port) "drain_timeout_s" (int $target.drainTimeoutSeconds) -}}
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

{{/* Ray's head: Serve's controller and no replica. */}}
{{- define "galley.rayHeadPod" -}}
{{ include "galley.podCommon" . }}
terminationGracePeriodSeconds: {{ include "galley.gracePeriod" . }}
{{- include "galley.placement" . }}
containers:
  - name: ray-head
    image: {{ include "galley.image" . }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    securityContext:
      {{- include "galley.containerSecurity" . | nindent 6 }}
    resources:
      {{- toYaml .values.resources | nindent 6 }}
    ports:
      - {name: gcs-server, containerPort: 6379, protocol: TCP}
      - {name: dashboard, containerPort: 8265, protocol: TCP}
      - {name: client, containerPort: 10001, protocol: TCP}
      # Nothing listens at this port, but KubeRay needs one of this name to report a RayService as ready.
      - {name: serve, containerPort: 8000, protocol: TCP}
    env:
      {{- include "galley.rayEnv" . | nindent 6 }}
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
    emptyDir: {sizeLimit: {{ .root.Values.target.rayService.scratchSizeLimit }}}
{{- end -}}

{{/* The pods of the replicas, one each. */}}
{{- define "galley.rayWorkerPod" -}}
{{ include "galley.podHead" . }}
{{- include "galley.download" . | nindent 0 }}
containers:
  - {{ include "galley.container" . | nindent 4 | trim }}
    ports:
      {{- include "galley.ports" . | nindent 6 }}
      - {name: ray-agent, containerPort: 52365, protocol: TCP}
    env:
      {{- include "galley.targetEnv" . | nindent 6 }}
      {{- include "galley.rayEnv" . | nindent 6 }}
    # Liveness is that of the Ray node, because Serve restarts replicas. Readiness is that of the replica.
    startupProbe:
      httpGet: {path: /api/local_raylet_healthz, port: ray-agent}
      periodSeconds: 2
      timeoutSeconds: 2
      failureThreshold: 60
    readinessProbe:
      grpc: {port: {{ .values.healthPort }}}
      periodSeconds: 5
      timeoutSeconds: 3
      failureThreshold: 2
    livenessProbe:
      httpGet: {path: /api/local_raylet_healthz, port: ray-agent}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 6
    {{- include "galley.lifecycle" . | nindent 4 }}
volumes:
  {{- include "galley.volumes" . | nindent 2 }}
{{- end -}}
