{{/* Backends of the routes of the Gateway API. */}}

{{/* Name of the endpoint picker of one way in; empty if requests go to the Service. (dict "root" $ "way" "http") */}}
{{- define "galley.pickerOf" -}}
{{- $pool := .root.Values.inferencePool -}}
{{- if $pool.enabled }}{{ (index $pool .way).endpointPicker.name }}{{ end -}}
{{- end -}}

{{- define "galley.poolName" -}}
{{- include "galley.roleName" . }}-{{ .way -}}
{{- end -}}

{{/* A backendRef: the InferencePool, or the Service. (dict "root" $ "role" "gateway" "way" "http") */}}
{{- define "galley.backend" -}}
{{- if include "galley.pickerOf" . -}}
- {group: inference.networking.k8s.io, kind: InferencePool, name: {{ include "galley.poolName" . }}}
{{- else -}}
- {name: {{ include "galley.roleName" . }}, port: {{ include "galley.servicePort" . }}}
{{- end -}}
{{- end -}}

{{- define "galley.requestTimeout" -}}
{{- with .Values.gatewayApi.requestTimeout -}}
timeouts: {request: {{ . }}}
{{- end -}}
{{- end -}}
