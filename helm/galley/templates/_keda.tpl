{{/*
Queries of Prometheus that scale a pool, each of (dict "root" $).

KEDA divides the answer by the number of replicas before it compares (AverageValue: the only kind with a fallback), so
that what is an average or a share here is multiplied by the number of replicas that tell something. Without traffic
an answer is 0; where nothing is scraped there is none, KEDA counts a failure, and after some the fallback holds.
*/}}

{{- define "galley.matchers" -}}
{{- .root.Values.keda.prometheus.matchers | default (printf "namespace=%q" .root.Release.Namespace) -}}
{{- end -}}

{{/* How long the slowest tenth waited; `metric` is a histogram, `gauge` one that every replica has. */}}
{{- define "galley.queueAgeQuery" -}}
{{- $in := include "galley.matchers" . -}}
((histogram_quantile(0.9, sum by (le) (rate({{ .metric }}_bucket{ {{- $in -}} }[2m]))) > 0) or 0 * sum(rate({{ .metric }}_count{ {{- $in -}} }[2m]))) * count({{ .gauge }}{ {{- $in -}} })
{{- end -}}

{{/* Which share of the rounds' time verification stood idle, waiting for a draft. */}}
{{- define "galley.draftWaitQuery" -}}
{{- $in := include "galley.matchers" . -}}
(sum(rate(galley_verify_draft_wait_seconds_sum{ {{- $in -}} }[2m])) / (sum(rate(galley_round_duration_seconds_sum{ {{- $in -}} }[2m])) > 0) or 0 * sum(rate(galley_round_duration_seconds_sum{ {{- $in -}} }[2m]))) * count(galley_draft_queue_depth{ {{- $in -}} })
{{- end -}}

{{/* Which share of the KV blocks live sessions hold; the others are free, or hold what may be had back. */}}
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
    # No answer is a failure, not a zero: a pool is not shrunk because nobody looks.
    ignoreNullValues: "false"
  {{- with $prometheus.authenticationRef }}
  authenticationRef: {name: {{ . }}}
  {{- end }}
{{- end -}}

{{/* What both ScaledObjects say, but for whom they scale and by what. */}}
{{- define "galley.scaling" -}}
{{- $scaling := index .root.Values.keda .role -}}
pollingInterval: {{ .root.Values.keda.pollingIntervalSeconds }}
minReplicaCount: {{ $scaling.minReplicas }}
maxReplicaCount: {{ $scaling.maxReplicas }}
# With Prometheus away: this many, or as many as there are if that is more.
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
        # One after the other: a replica that goes takes its caches with it.
        stabilizationWindowSeconds: {{ $scaling.scaleDownStabilizationSeconds }}
        policies:
          - {type: Pods, value: 1, periodSeconds: 120}
{{- end -}}
