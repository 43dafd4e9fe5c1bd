{{/* Peers and ports of the NetworkPolicies. */}}

{{/* Peers: pods of these roles. (dict "root" $ "roles" (list …)) */}}
{{- define "galley.podsOf" -}}
{{- $root := .root -}}
{{- range .roles }}
- podSelector:
    matchLabels:
      {{- include "galley.selector" (dict "root" $root "role" .) | nindent 6 }}
{{- end }}
{{- end -}}

{{/* The role of the pod that learns, if there is one, as a JSON list. */}}
{{- define "galley.learningRoles" -}}
{{- ternary (list "learning") list .Values.learning.enabled | toJson -}}
{{- end -}}

{{/* Metadata and selector of a role's policy. */}}
{{- define "galley.policyHead" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "galley.metadata" . | nindent 2 }}
spec:
  podSelector:
    matchLabels:
      {{- include "galley.selector" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
{{- end -}}

{{/* Ingress of Prometheus, at the port of `.values`, or of the role. */}}
{{- define "galley.fromPrometheus" -}}
{{- if ne .root.Values.monitoring.scrape "none" }}
- from:
    {{- toYaml .root.Values.networkPolicy.prometheus | nindent 4 }}
  ports:
    - {port: {{ (.values | default (index .root.Values .role)).metricsPort }}, protocol: TCP}
{{- end }}
{{- end -}}

{{/* The port of an address or URL, or `default`. (dict "address" "host:port" "default" 443) */}}
{{- define "galley.portOf" -}}
{{- $authority := regexReplaceAll "^([^:/]+://)?([^/?]*).*$" .address "${2}" -}}
{{- regexFind ":[0-9]+$" $authority | trimPrefix ":" | default .default -}}
{{- end -}}

{{- define "galley.toDns" -}}
- to:
    {{- toYaml .Values.networkPolicy.dns | nindent 4 }}
  ports:
    {{- range .Values.networkPolicy.dnsPorts }}
    - {port: {{ . }}, protocol: UDP}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end -}}

{{/* Egress to DNS, store and collector; with `https` (ports separated by blanks) also to the hub and the issuer. */}}
{{- define "galley.egress" -}}
{{- $values := .root.Values -}}
{{- $policy := $values.networkPolicy -}}
{{ include "galley.toDns" .root }}
{{- if $values.redis.embedded.enabled }}
- to:
    {{- include "galley.podsOf" (dict "root" .root "roles" (list "redis")) | nindent 4 }}
  ports:
    - {port: {{ $values.redis.embedded.port }}, protocol: TCP}
{{- else }}
- {{ with $policy.redis.to -}}
  to:
    {{- toYaml . | nindent 4 }}
  {{ end -}}
  ports:
    {{- range $policy.redis.ports }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end }}
{{- if $values.otel.endpoint }}
- {{ with $policy.otel.to -}}
  to:
    {{- toYaml . | nindent 4 }}
  {{ end -}}
  ports:
    - {port: {{ include "galley.portOf" (dict "address" $values.otel.endpoint "default" 4317) }}, protocol: TCP}
{{- end }}
{{- with .https }}
# The model hub and the issuer.
- to:
    {{- toYaml $policy.https | nindent 4 }}
  ports:
    {{- range splitList " " . | uniq }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end }}
{{- end -}}

{{/* Peers of the target's pods at any port: ranks and Ray choose their ports at the start. Empty for one pod per replica. */}}
{{- define "galley.amongThemselves" -}}
{{- $target := .Values.target -}}
{{- if eq $target.kind "rayservice" -}}
{{- include "galley.podsOf" (dict "root" . "roles" (list "target" "ray-head")) -}}
{{- else if eq $target.kind "leaderworkerset" -}}
{{- include "galley.podsOf" (dict "root" . "roles" (list "target")) -}}
{{- end -}}
{{- end -}}
