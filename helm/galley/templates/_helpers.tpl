{{/* Pieces that the roles share. Most take (dict "root" $ "role" "gateway"). */}}

{{- define "galley.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "galley.selector" -}}
app.kubernetes.io/name: galley
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{- define "galley.labels" -}}
{{ include "galley.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: galley
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "galley.image" -}}
{{- $image := .root.Values.image -}}
{{- $role := index .root.Values .role -}}
{{- with $image.registry }}{{ . }}/{{ end -}}
{{- $role.image.repository }}:{{ $image.tag | default .root.Chart.AppVersion -}}
{{- end -}}

{{/* Behind the name stands a headless service, so one address a pod. */}}
{{- define "galley.address" -}}
{{ include "galley.name" .root }}-{{ .role }}:{{ (index .root.Values .role).port }}
{{- end -}}

{{/* A value of `settings` as text; helm reads numbers as float64, which would print 1e+06. */}}
{{- define "galley.text" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{- define "galley.env" -}}
{{- $prefix := printf "GALLEY_%s_" (upper .role) -}}
{{- $role := index .root.Values .role -}}
- name: {{ $prefix }}HOST
  value: "0.0.0.0"
- name: {{ $prefix }}PORT
  value: {{ $role.port | quote }}
- name: {{ $prefix }}LOG_LEVEL
  value: {{ .root.Values.logLevel | quote }}
- name: {{ $prefix }}LOG_FORMAT
  value: json
- name: {{ $prefix }}DRAIN_TIMEOUT_S
  value: {{ $role.drainTimeoutSeconds | quote }}
{{- range $key, $value := $role.settings }}
- name: {{ $prefix }}{{ upper $key }}
  value: {{ include "galley.text" $value | quote }}
{{- end }}
{{- with .root.Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Health is grpc.health.v1 on the one port of the service; the kubelet asks it natively. */}}
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
# Slow to conclude: a restart loses every cache. (A draining pod is no longer asked.)
livenessProbe:
  grpc: {port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{- define "galley.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "galley.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* What every pod of Galley's own says before its containers. */}}
{{- define "galley.podHead" -}}
{{- $role := index .root.Values .role -}}
automountServiceAccountToken: false
# Kubernetes would else give every pod GALLEY_GATEWAY_PORT=tcp://..., for the service of that name, and the
# gateway would read it as its own setting.
enableServiceLinks: false
# Longer than the drain, so that SIGKILL never cuts it short.
terminationGracePeriodSeconds: {{ add $role.drainTimeoutSeconds 15 }}
securityContext:
  {{- include "galley.podSecurity" . | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $role.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $role.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The container of a role, but for its environment and probes. */}}
{{- define "galley.container" -}}
{{- $role := index .root.Values .role -}}
- name: {{ .role }}
  image: {{ include "galley.image" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  ports:
    - {name: grpc, containerPort: {{ $role.port }}, protocol: TCP}
  securityContext:
    {{- include "galley.containerSecurity" . | nindent 4 }}
  resources:
    {{- toYaml $role.resources | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: cache, mountPath: /var/cache/galley}
    {{- with $role.apiKeys }}
    {{- if .name }}
    - {name: api-keys, mountPath: /etc/galley/api-keys, readOnly: true}
    {{- end }}
    {{- end }}
{{- end -}}

{{- define "galley.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 256Mi}
- name: cache
  emptyDir: {sizeLimit: {{ .root.Values.modelCache.sizeLimit }}}
{{- end -}}
