{{/* Environment variables of the roles. galley.extensions adds extraEnv. */}}

{{- define "galley.env" -}}
{{- $prefix := printf "GALLEY_%s_" (upper .role) -}}
{{- $role := .values -}}
# All addresses, of IPv4 and of IPv6.
- name: {{ $prefix }}HOST
  value: "::"
- name: {{ $prefix }}PORT
  value: {{ $role.port | quote }}
- name: {{ $prefix }}HEALTH_PORT
  value: {{ $role.healthPort | quote }}
- name: {{ $prefix }}METRICS_PORT
  value: {{ $role.metricsPort | quote }}
- name: {{ $prefix }}LOG_LEVEL
  value: {{ .root.Values.logLevel | quote }}
- name: {{ $prefix }}LOG_FORMAT
  value: json
- name: {{ $prefix }}DRAIN_TIMEOUT_S
  value: {{ $role.drainTimeoutSeconds | quote }}
- name: {{ $prefix }}REDIS_URL
  {{- include "galley.redisUrl" . | nindent 2 }}
# Releases may share a store: each uses its own replicas only. A namespace's name has no dot.
- name: {{ $prefix }}POOL
  value: {{ printf "%s.%s" .root.Release.Namespace .root.Release.Name | toYaml }}
{{- include "galley.tlsEnv" . }}
{{- include "galley.otelEnv" . }}
{{- range $key, $value := $role.settings }}
- name: {{ $prefix }}{{ upper $key }}
  value: {{ include "galley.text" $value | quote }}
{{- end }}
{{- include "galley.hubEnv" . }}
{{- end -}}

{{/* A replica registers in the store with its pod's address. */}}
{{- define "galley.advertiseEnv" -}}
- name: POD_IP
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
- name: GALLEY_{{ upper .role }}_ADVERTISE
  value: $(POD_IP):{{ .values.port }}
{{- end -}}

{{- define "galley.tlsEnv" -}}
{{- $values := .root.Values -}}
{{- if $values.tls.enabled }}
{{- $prefix := printf "GALLEY_%s_" (upper .role) }}
- name: {{ $prefix }}TLS_CERT_FILE
  value: /etc/galley/tls/tls.crt
- name: {{ $prefix }}TLS_KEY_FILE
  value: /etc/galley/tls/tls.key
{{- if eq .role "gateway" }}
{{- if $values.tls.gateway.clientCaSecretName }}
- name: GALLEY_GATEWAY_TLS_CLIENT_CA_FILE
  value: /etc/galley/client-ca/ca.crt
{{- end }}
- name: GALLEY_GATEWAY_PEER_CA_FILE
  value: /etc/galley/peer-tls/ca.crt
{{- if $values.tls.mutual }}
- name: GALLEY_GATEWAY_PEER_CERT_FILE
  value: /etc/galley/peer-tls/tls.crt
- name: GALLEY_GATEWAY_PEER_KEY_FILE
  value: /etc/galley/peer-tls/tls.key
{{- end }}
# Replicas are reached by pod address; their certificates carry a name.
- name: GALLEY_GATEWAY_TARGET_TLS_NAME
  value: {{ include "galley.tlsName" (dict "root" .root "role" "target") }}
- name: GALLEY_GATEWAY_DRAFT_TLS_NAME
  value: {{ include "galley.tlsName" (dict "root" .root "role" "draft") }}
{{- else if $values.tls.mutual }}
- name: {{ $prefix }}TLS_CLIENT_CA_FILE
  value: /etc/galley/tls/ca.crt
{{- end }}
{{- end }}
{{- end -}}

{{- define "galley.otelEnv" -}}
{{- $otel := .root.Values.otel -}}
{{- if $otel.endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ $otel.endpoint | quote }}
# Parent based: a request is traced in all processes or in none.
- name: OTEL_TRACES_SAMPLER
  value: parentbased_traceidratio
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ $otel.sampleRatio | quote }}
{{- if not $otel.metrics }}
- name: OTEL_METRICS_EXPORTER
  value: none
{{- end }}
{{- if $otel.caSecretName }}
- name: OTEL_EXPORTER_OTLP_CERTIFICATE
  value: /etc/galley/otel-ca/ca.crt
{{- end }}
- name: POD_NAME
  valueFrom:
    fieldRef: {fieldPath: metadata.name}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name={{ .root.Release.Namespace }},k8s.pod.name=$(POD_NAME)
{{- end }}
{{- end -}}
