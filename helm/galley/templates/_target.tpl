{{/* The common parts of the three kinds of target. */}}

{{/* Environment of every target process. (dict "root" $ "role" "target") */}}
{{- define "galley.targetEnv" -}}
{{- $values := .root.Values -}}
{{- $target := $values.target -}}
{{ include "galley.env" . }}
{{ include "galley.advertiseEnv" . }}
{{- with $values.model }}
- name: GALLEY_TARGET_MODEL
  value: {{ . | quote }}
{{- end }}
{{- if and $target.gpus (not $target.settings.device) }}
- name: GALLEY_TARGET_DEVICE
  value: cuda
{{- end }}
{{- if eq $target.engine "vllm" }}
- name: GALLEY_TARGET_ENGINE
  value: vllm
{{- with $target.vllmArgs }}
- name: GALLEY_TARGET_VLLM_ARGS
  value: {{ toJson . | quote }}
{{- end }}
{{- end }}
{{- if ne $target.kind "rayservice" }}
{{- if gt (int $target.tensorParallel) 1 }}
- name: GALLEY_TARGET_TENSOR_PARALLEL
  value: {{ $target.tensorParallel | quote }}
{{- end }}
{{- if eq $target.kind "leaderworkerset" }}
- name: GALLEY_TARGET_HOSTS
  value: {{ $target.nodes | quote }}
- name: GALLEY_TARGET_HOST_INDEX
  valueFrom:
    fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}
- name: GROUP_INDEX
  valueFrom:
    fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"}
# The leader's DNS name in the Service that the controller creates. It resolves before the pod is ready.
- name: GALLEY_TARGET_RANKS_ADDRESS
  value: {{ $name := include "galley.roleName" . }}{{ $name }}-$(GROUP_INDEX).{{ $name }}:{{ $target.ranksPort }}
- name: GALLEY_TARGET_RANKS_TIMEOUT_S
  value: {{ $target.startupTimeoutSeconds | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The pods of a StatefulSet, and the leaders of a LeaderWorkerSet. */}}
{{- define "galley.targetPod" -}}
{{ include "galley.podHead" . }}
{{- include "galley.download" . | nindent 0 }}
containers:
  - {{ include "galley.container" . | nindent 4 | trim }}
    ports:
      {{- include "galley.ports" . | nindent 6 }}
      {{- if eq .values.kind "leaderworkerset" }}
      - {name: ranks, containerPort: {{ .values.ranksPort }}, protocol: TCP}
      {{- end }}
    env:
      {{- include "galley.targetEnv" . | nindent 6 }}
    {{- include "galley.probes" (dict "port" .values.healthPort "startupSeconds" .values.startupTimeoutSeconds) | nindent 4 }}
    {{- include "galley.lifecycle" . | nindent 4 }}
volumes:
  {{- include "galley.volumes" . | nindent 2 }}
{{- end -}}

{{/* The other pods of a group of a LeaderWorkerSet. */}}
{{- define "galley.targetWorkerPod" -}}
{{ include "galley.podHead" . }}
{{- include "galley.download" . | nindent 0 }}
containers:
  # Workers have no probes: a worker exits when one of its ranks does. The leader is probed,
  # and exits when a rank does not respond.
  - {{ include "galley.container" . | nindent 4 | trim }}
    env:
      {{- include "galley.targetEnv" . | nindent 6 }}
volumes:
  {{- include "galley.volumes" . | nindent 2 }}
{{- end -}}
