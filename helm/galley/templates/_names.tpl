{{/*
Names, labels, images, addresses. Most helpers of this chart take (dict "root" $ "role" "gateway" "values" .Values.gateway), where
`values` are those of the role.
*/}}

{{/*
The prefix of all names: a DNS label of at most 40 characters that begins with a letter, as a Service's name must. A release name
that is none, or is too long, becomes one with a hash of the whole name, so that two releases never share it.
*/}}
{{- define "galley.name" -}}
{{- $chart := .Values.nameOverride | default .Chart.Name -}}
{{- $whole := ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) -}}
{{- $label := regexReplaceAll "^[0-9]" (replace "." "-" $whole) "g-${0}" -}}
{{- if or (ne $label $whole) (gt (len $label) 40) -}}
{{- $label = printf "%s-%s" ($label | trunc 31 | trimSuffix "-") (sha256sum $whole | trunc 8) -}}
{{- end -}}
{{- .Values.fullnameOverride | default $label -}}
{{- end -}}

{{/* The name of a role's objects; `component` replaces the role in names and labels. */}}
{{- define "galley.roleName" -}}
{{- include "galley.name" .root }}-{{ .component | default .role }}{{ with .values }}{{ with .name }}-{{ . }}{{ end }}{{ end -}}
{{- end -}}

{{/* Selector of every pod of the release. */}}
{{- define "galley.releaseSelector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default "galley" }}
app.kubernetes.io/instance: {{ toYaml .Release.Name }}
{{- end -}}

{{- define "galley.selector" -}}
{{ include "galley.releaseSelector" .root }}
app.kubernetes.io/component: {{ .component | default .role }}
{{- with .values }}
{{- with .name }}
galley-pool: {{ toYaml . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "galley.labels" -}}
{{ include "galley.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: galley
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Labels of pods, without the versions: pods restart when a label changes. */}}
{{- define "galley.podLabels" -}}
{{ include "galley.selector" . }}
app.kubernetes.io/part-of: galley
{{- end -}}

{{/* Metadata of a role's object; `name` overrides the role's name. */}}
{{- define "galley.metadata" -}}
name: {{ .name | default (include "galley.roleName" .) }}
namespace: {{ toYaml .root.Release.Namespace }}
labels:
  {{- include "galley.labels" . | nindent 2 }}
{{- end -}}

{{- define "galley.image" -}}
{{- $image := .root.Values.image -}}
{{- $own := .values.image -}}
{{- with (.root.Values.global).imageRegistry | default $image.registry }}{{ . }}/{{ end -}}
{{- $own.repository }}:{{ $own.tag | default $image.tag | default .root.Chart.AppVersion -}}
{{- end -}}

{{/* The name that a role's certificate must carry. */}}
{{- define "galley.tlsName" -}}
{{- $own := (index .root.Values.tls .role).name -}}
{{- $own | default (printf "%s.%s.svc" (include "galley.roleName" .) .root.Release.Namespace) -}}
{{- end -}}

{{- define "galley.isHubId" -}}
{{- if and . (not (hasPrefix "/" .)) }}true{{ end -}}
{{- end -}}

{{/* A value of `settings` as text; helm reads numbers as float64, which would print as 1e+06. */}}
{{- define "galley.text" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{/* A quantity of bytes as a number; 0 if it is empty or below a byte. */}}
{{- define "galley.bytes" -}}
{{- $text := toString . -}}
{{- $unit := regexFind "[A-Za-z]+$" $text -}}
{{- $power := dict "k" 1 "K" 1 "M" 2 "G" 3 "T" 4 "P" 5 -}}
{{- $factor := 1.0 -}}
{{- $base := ternary 1024.0 1000.0 (hasSuffix "i" $unit) -}}
{{- range until (get $power (trimSuffix "i" $unit) | default 0 | int) -}}{{- $factor = mulf $factor $base -}}{{- end -}}
{{- if has $unit (list "m" "u" "n") -}}0{{- else -}}{{- mulf (trimSuffix $unit $text | default "0" | float64) $factor | int64 -}}{{- end -}}
{{- end -}}

{{/* A duration of Prometheus, such as 1h30m, in milliseconds. */}}
{{- define "galley.milliseconds" -}}
{{- $units := dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000 "d" 86400000 "w" 604800000 -}}
{{- $total := 0 -}}
{{- range regexFindAll "[0-9]+[a-z]+" . -1 -}}
{{- $total = add $total (mul (regexFind "[0-9]+" .) (get $units (regexFind "[a-z]+" .))) -}}
{{- end -}}
{{- $total -}}
{{- end -}}

{{/* True if gateways serve HTTP. */}}
{{- define "galley.hasHttp" -}}
{{- if gt (int .Values.gateway.httpPort) 0 }}true{{ end -}}
{{- end -}}

{{/* True if an autoscaler sets the number of a role's pods. */}}
{{- define "galley.isScaled" -}}
{{- $own := .values.autoscaling -}}
{{- $keda := include "galley.kedaOf" . | fromJson -}}
{{- if or (and $own $own.enabled) (and .root.Values.keda.enabled $keda.enabled) }}true{{ end -}}
{{- end -}}

{{/* True if callers need a key or a token. */}}
{{- define "galley.hasAuth" -}}
{{- if or .Values.auth.apiKeys.secretName .Values.auth.jwt.enabled }}true{{ end -}}
{{- end -}}
