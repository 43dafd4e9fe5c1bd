{{/*
Prometheus queries that scale a pool. Each takes (dict "root" $ "role" … "values" …).

KEDA divides the result by the number of replicas before it compares it (AverageValue, the only metric type with a
fallback). Queries for a mean or a share therefore multiply it by the number of replicas that export the gauge. The
result is 0 without traffic, and empty if nothing is scraped: KEDA counts that as a failure, and uses the fallback
after three in a row.
*/}}

{{- define "galley.matchers" -}}
{{- .root.Values.keda.prometheus.matchers | default (include "galley.releaseMatchers" .root) -}}
{{- end -}}

{{/* The same for one of several pools of drafts, by the names of its pods; a canary's have one more part. */}}
{{- define "galley.poolMatchers" -}}
{{- include "galley.matchers" . -}}
{{- if or .values.name (and (eq .role "draft") (include "galley.hasCanary" .root)) }}, pod=~"{{ include "galley.roleName" . }}-[a-z0-9]+-[a-z0-9]+"{{ end -}}
{{- end -}}

{{/* Open sessions over places. Every gateway exports both; one that drains still counts its own. */}}
{{- define "galley.openSessionsQuery" -}}
{{- $in := include "galley.matchers" . -}}
sum(galley_sessions_open{ {{- $in -}} }) / sum(galley_sessions_limit{ {{- $in -}} }) * count(galley_sessions_limit{ {{- $in -}} })
{{- end -}}

{{/* 90th percentile of the histogram `metric` of queue times; every replica exports `gauge`. */}}
{{- define "galley.queueAgeQuery" -}}
{{- $in := include "galley.poolMatchers" . -}}
((histogram_quantile(0.9, sum by (le) (rate({{ .metric }}_bucket{ {{- $in -}} }[2m]))) > 0) or 0 * sum(rate({{ .metric }}_count{ {{- $in -}} }[2m]))) * count({{ .gauge }}{ {{- $in -}} })
{{- end -}}

{{/* Share of round time spent waiting for a draft. */}}
{{- define "galley.draftWaitQuery" -}}
{{- $in := include "galley.matchers" . -}}
(sum(rate(galley_verify_draft_wait_seconds_sum{ {{- $in -}} }[2m])) / (sum(rate(galley_round_duration_seconds_sum{ {{- $in -}} }[2m])) > 0) or 0 * sum(rate(galley_round_duration_seconds_sum{ {{- $in -}} }[2m]))) * count(galley_draft_queue_depth{ {{- include "galley.poolMatchers" . -}} })
{{- end -}}

{{/* Share of KV blocks held by live sessions; the others are free or cached. */}}
{{- define "galley.usedBlocksQuery" -}}
{{- $in := include "galley.matchers" . -}}
sum(galley_kv_blocks{ {{- $in -}} ,state="used"}) / sum(galley_kv_blocks{ {{- $in -}} }) * count(galley_queue_depth{ {{- $in -}} })
{{- end -}}

{{/* (dict "root" $ "name" … "query" … "threshold" …) */}}
{{- define "galley.trigger" -}}
{{- $prometheus := .root.Values.keda.prometheus -}}
- type: prometheus
  name: {{ .name }}
  metricType: AverageValue
  metadata:
    serverAddress: {{ $prometheus.serverAddress | quote }}
    query: {{ .query | quote }}
    threshold: {{ .threshold | quote }}
    # A missing series is a failure, not zero, so that a pool is not scaled down without data.
    ignoreNullValues: "false"
  {{- with $prometheus.authenticationRef }}
  authenticationRef: {name: {{ . }}}
  {{- end }}
{{- end -}}

{{/* The common part of all ScaledObjects. */}}
{{- define "galley.scaling" -}}
{{- $scaling := include "galley.kedaOf" . | fromJson -}}
pollingInterval: {{ .root.Values.keda.pollingIntervalSeconds }}
minReplicaCount: {{ $scaling.minReplicas }}
maxReplicaCount: {{ $scaling.maxReplicas }}
# Without Prometheus: this number, or the current number if that is higher.
fallback:
  failureThreshold: 3
  replicas: {{ $scaling.fallbackReplicas }}
  behavior: currentReplicasIfHigher
advanced:
  horizontalPodAutoscalerConfig:
    behavior:
      scaleUp:
        stabilizationWindowSeconds: 0
        policies:
          - {type: Pods, value: {{ $scaling.scaleUpPods }}, periodSeconds: 60}
      scaleDown:
        # One at a time: a replica loses its caches when it stops.
        stabilizationWindowSeconds: {{ $scaling.scaleDownStabilizationSeconds }}
        policies:
          - {type: Pods, value: 1, periodSeconds: 120}
{{- end -}}
