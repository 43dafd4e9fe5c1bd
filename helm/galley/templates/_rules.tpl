{{/*
Recording rules and alerts, in the format of a rule file. `make monitoring` writes them for all releases, with the default
values, into deploy/prometheus/galley.rules.yaml.
*/}}

{{/* Label of a series that holds the release's name. */}}
{{- define "galley.releaseLabel" -}}
{{- $known := ternary "app_kubernetes_io_instance" "release" (eq .Values.monitoring.scrape "annotations") -}}
{{- .Values.monitoring.releaseLabel | default $known -}}
{{- end -}}

{{/* Matchers of PromQL that select the series of this release. */}}
{{- define "galley.releaseMatchers" -}}
{{- printf "namespace=%q, %s=%q" .Release.Namespace (include "galley.releaseLabel" .) .Release.Name -}}
{{- end -}}

{{/* Matcher of a bucket by its bound. A scraped bound of one second is 1.0, a pushed one may be 1. */}}
{{- define "galley.bucket" -}}
{{- if eq (float64 .) (floor .) -}}
le=~"{{ int . }}|{{ int . }}[.]0"
{{- else -}}
le="{{ . }}"
{{- end -}}
{{- end -}}

{{/* What every alert ends with: (list $ <values of the alert, with severity and for>). */}}
{{- define "galley.alertFields" -}}
{{- $rules := (first .).Values.monitoring.rules -}}
{{- $its := last . -}}
for: {{ $its.for }}
labels:
  severity: {{ index $rules.severities $its.severity | toYaml }}
  {{- with $rules.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "galley.runbook" -}}
runbook_url: {{ (first .).Values.monitoring.rules.runbookBaseUrl | default "docs/runbooks" | trimSuffix "/" }}/{{ last . }}.md
{{- end -}}

{{- define "galley.rules" -}}
groups:
  - name: galley
    rules:
      {{- include "galley.objectiveRules" . | trim | nindent 6 }}
      {{- include "galley.poolRules" . | trim | nindent 6 }}
      {{- include "galley.speculationRules" . | trim | nindent 6 }}
      {{- include "galley.loadRules" . | trim | nindent 6 }}
      {{- include "galley.auditRules" . | trim | nindent 6 }}
      {{- include "galley.certificateRules" . | trim | nindent 6 }}
{{- end -}}

{{/*
Burn rates of the error budgets and their alerts, as in Google's SRE workbook, chapter 5. A rate of 1 uses the budget up in
30 days; 14.4 for an hour uses 2 % of it, 6 for six hours 5 %.
*/}}
{{- define "galley.objectiveRules" -}}
{{- $rules := .Values.monitoring.rules -}}
{{- $in := include "galley.releaseMatchers" . -}}
{{- $by := printf "namespace, %s" (include "galley.releaseLabel" .) -}}
{{- $windows := list -}}
{{- range $rules.burnRates }}{{ $windows = append (append $windows .shortWindow) .window }}{{ end -}}
{{- range $each := include "galley.objectives" $rules.objectives | fromYamlArray }}
{{- $metric := $each.metric }}
{{- range $window := uniq $windows }}
- record: {{ $each.record }}
  expr: |
    {{- if $each.bucket }}
    (1 - sum by ({{ $by }}) (rate({{ $metric }}_bucket{ {{- $each.bucket }}, {{ $in }}}[{{ $window }}]))
      / sum by ({{ $by }}) (rate({{ $metric }}_count{ {{- $in -}} }[{{ $window }}]))) / {{ $each.budget }}
    {{- else }}
    sum by ({{ $by }}) (rate({{ $metric }}{fault="server", {{ $in }}}[{{ $window }}]))
      / sum by ({{ $by }}) (rate({{ $metric }}{fault!="caller", {{ $in }}}[{{ $window }}])) / {{ $each.budget }}
    {{- end }}
  labels: {window: {{ $window }}}
{{- end }}
{{- if (index $rules.alerts $each.alert).enabled }}
{{- range $severity, $burn := $rules.burnRates }}
- alert: {{ $each.alert }}
  expr: |
    {{ $each.record }}{window="{{ $burn.window }}", {{ $in }}} > {{ $burn.rate }}
      and ignoring (window) {{ $each.record }}{window="{{ $burn.shortWindow }}", {{ $in }}} > {{ $burn.rate }}
      and ignoring (window)
    {{- if $each.bucket }}
        sum by ({{ $by }}) (increase({{ $metric }}_count{ {{- $in -}} }[{{ $burn.window }}]))
          - sum by ({{ $by }}) (increase({{ $metric }}_bucket{ {{- $each.bucket }}, {{ $in }}}[{{ $burn.window }}]))
    {{- else }}
        sum by ({{ $by }}) (increase({{ $metric }}{fault="server", {{ $in }}}[{{ $burn.window }}]))
    {{- end }}
        >= {{ $burn.minEvents }}
  {{- include "galley.alertFields" (list $ (dict "severity" $severity "for" $burn.for)) | nindent 2 }}
  annotations:
    summary: {{ $each.what }} use the error budget too fast
    description: >-
      In the last {{ $burn.window }} the error budget of 30 days was used {{ `{{ $value | printf "%.1f" }}` }} times too fast; the
      limit is {{ $burn.rate }}. The budget is {{ $each.goal }}.
    {{ include "galley.runbook" (list $ $each.alert) }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "galley.objectives" -}}
{{- $first := .timeToFirstToken -}}
{{- $token := .timePerOutputToken -}}
- alert: GalleyTtftBudgetBurn
  record: galley:ttft:burn_rate
  metric: gen_ai_server_time_to_first_token_seconds
  bucket: {{ include "galley.bucket" $first.seconds | quote }}
  budget: {{ $first.budget }}
  what: Late first tokens
  goal: {{ mulf $first.budget 100 }} % of first tokens later than {{ $first.seconds }} s
- alert: GalleyTimePerTokenBudgetBurn
  record: galley:time_per_token:burn_rate
  metric: gen_ai_server_time_per_output_token_seconds
  bucket: {{ include "galley.bucket" $token.seconds | quote }}
  budget: {{ $token.budget }}
  what: Slow streams
  goal: {{ mulf $token.budget 100 }} % of streams slower than {{ $token.seconds }} s a token
- alert: GalleyErrorBudgetBurn
  record: galley:errors:burn_rate
  metric: galley_streams_total
  bucket: ""
  budget: {{ .errors.budget }}
  what: Server errors
  goal: {{ mulf .errors.budget 100 }} % of calls with a server error
{{- end -}}

{{/* A gateway reports open sessions once it has started, and then the replicas that it reaches. */}}
{{- define "galley.poolRules" -}}
{{- $alerts := .Values.monitoring.rules.alerts -}}
{{- $in := include "galley.releaseMatchers" . -}}
{{- $by := printf "namespace, %s" (include "galley.releaseLabel" .) -}}
{{- with $alerts.GalleyMetricsAbsent }}
{{- if .enabled }}
- alert: GalleyMetricsAbsent
  expr: absent(galley_build_info{ {{- $in -}} })
  {{- include "galley.alertFields" (list $ .) | nindent 2 }}
  annotations:
    summary: Prometheus has no metrics of this release
    description: >-
      For {{ .for }} Prometheus had no metrics of any process of this release. All are down, or none is scraped. No other
      alert of this release can fire until then.
    {{ include "galley.runbook" (list $ "GalleyMetricsAbsent") }}
- alert: GalleyMetricsAbsent
  expr: |
    {{- range $index, $role := list "target" "draft" }}
    {{ if $index }}or {{ end }}(absent(galley_build_info{service="{{ $role }}", {{ $in }}})
      and on () max(galley_replicas{pool="{{ $role }}", state="up", {{ $in }}}) > 0)
    {{- end }}
  {{- include "galley.alertFields" (list $ (set (deepCopy .) "severity" "ticket")) | nindent 2 }}
  annotations:
    summary: Prometheus has no metrics of the pool {{ `{{ $labels.service }}` }}
    description: >-
      Gateways reach replicas of the pool {{ `{{ $labels.service }}` }}, but for {{ .for }} Prometheus had no metrics of them.
    {{ include "galley.runbook" (list $ "GalleyMetricsAbsent") }}
{{- end }}
{{- end }}
{{- with $alerts.GalleyGatewayPoolDown }}
{{- if .enabled }}
- alert: GalleyGatewayPoolDown
  expr: |
    absent(galley_sessions_open{ {{- $in -}} }) unless on () absent(galley_build_info{ {{- $in -}} })
  {{- include "galley.alertFields" (list $ .) | nindent 2 }}
  annotations:
    summary: No gateway serves
    description: >-
      For {{ .for }} Prometheus had metrics of processes of this release, but of no gateway that has started. Calls fail.
    {{ include "galley.runbook" (list $ "GalleyGatewayPoolDown") }}
{{- end }}
{{- end }}
{{- with $alerts.GalleyTargetPoolDown }}
{{- if .enabled }}
- alert: GalleyTargetPoolDown
  expr: |
    max by ({{ $by }}) (galley_replicas{pool="target", state="up", {{ $in }}}) == 0
      or (
        sum by ({{ $by }}) (galley_sessions_open{ {{- $in -}} }) > 0
          unless sum by ({{ $by }}) (rate(galley_rounds_total{ {{- $in -}} }[5m])) > 0
          unless sum by ({{ $by }}) (rate(galley_batch_duration_seconds_count{ {{- $in -}} }[5m])) > 0
          unless sum by ({{ $by }}) (increase(galley_store_retries_total{ {{- $in -}} }[5m])) > 5
      )
  {{- include "galley.alertFields" (list $ .) | nindent 2 }}
  annotations:
    summary: No target replica is available, or none decodes
    description: >-
      For {{ .for }} no gateway has had an available target replica, or streams were open while no step of a target ended. Streams
      pause, then end with UNAVAILABLE.
    {{ include "galley.runbook" (list $ "GalleyTargetPoolDown") }}
{{- end }}
{{- end }}
{{- with $alerts.GalleyStoreDown }}
{{- if .enabled }}
- alert: GalleyStoreDown
  expr: |
    sum by ({{ $by }}) (increase(galley_store_retries_total{ {{- $in -}} }[2m])) > 5
      unless sum by ({{ $by }}) (rate(galley_commit_duration_seconds_count{outcome="ok", {{ $in }}}[2m])) > 0
  {{- include "galley.alertFields" (list $ .) | nindent 2 }}
  annotations:
    summary: The session store is down
    description: >-
      For {{ .for }} calls to the session store were repeated and no commit succeeded. Calls and streams end with UNAVAILABLE.
      Replicas that start cannot register.
    {{ include "galley.runbook" (list $ "GalleyStoreDown") }}
{{- end }}
{{- end }}
{{- with $alerts.GalleyDraftPoolDown }}
{{- if .enabled }}
- alert: GalleyDraftPoolDown
  expr: |
    max by ({{ $by }}) (galley_replicas{pool="draft", state="up", {{ $in }}}) == 0
      or (
        min by ({{ $by }}) (galley_breaker_state{pool="draft", {{ $in }}}) > 0
          and min by ({{ $by }}) (
            max_over_time(galley_breaker_state{pool="draft", {{ $in }}}[5m]) and galley_breaker_state{pool="draft", {{ $in }}}
          ) > 1
          and sum by ({{ $by }}) (rate(galley_rounds_total{ {{- $in -}} }[2m])) > 0
      )
  {{- include "galley.alertFields" (list $ .) | nindent 2 }}
  annotations:
    summary: No draft replica is available
    description: >-
      No gateway has had an available draft replica for {{ .for }}. Output is the same but slower: gateways propose tokens by
      lookup in the session, or targets decode without drafts.
    {{ include "galley.runbook" (list $ "GalleyDraftPoolDown") }}
{{- end }}
{{- end }}
{{- with $alerts.GalleyReplicaDown }}
{{- if .enabled }}
- alert: GalleyReplicaDown
  expr: max by ({{ $by }}, pool) (galley_replicas{state="down", {{ $in }}}) > 0
  {{- include "galley.alertFields" (list $ .) | nindent 2 }}
  annotations:
    summary: Gateways cannot use a replica of the pool {{ `{{ $labels.pool }}` }}
    description: >-
      Registered replicas of the pool {{ `{{ $labels.pool }}` }} that a gateway could not use for {{ .for }}:
      {{ `{{ $value | printf "%.0f" }}` }}. They do not answer, or are refused.
    {{ include "galley.runbook" (list $ "GalleyReplicaDown") }}
{{- end }}
{{- end }}
{{- with $alerts.GalleyFailoverRateHigh }}
{{- if .enabled }}
- alert: GalleyFailoverRateHigh
  expr: |
    60 * sum by ({{ $by }}, pool) (rate(galley_failovers_total{reason!~"left|hedged", {{ $in }}}[{{ .window }}]))
      / on ({{ $by }}) group_left ()
        clamp_min(sum by ({{ $by }}) (avg_over_time(galley_sessions_open{ {{- $in -}} }[{{ .window }}])), 1)
      > {{ .threshold }}
  {{- include "galley.alertFields" (list $ .) | nindent 2 }}
  annotations:
    summary: Sessions move between {{ `{{ $labels.pool }}` }} replicas too often
    description: >-
      Each minute {{ `{{ $value | humanizePercentage }}` }} of the open sessions move to another or a restarted
      {{ `{{ $labels.pool }}` }} replica. Each move delays the session.
    {{ include "galley.runbook" (list $ "GalleyFailoverRateHigh") }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "galley.speculationRules" -}}
{{- $alerts := .Values.monitoring.rules.alerts -}}
{{- $in := include "galley.releaseMatchers" . -}}
{{- $by := printf "namespace, %s, workload" (include "galley.releaseLabel" .) -}}
{{- /* What sessions propose themselves hardly ever fails, and would hide drafts that do. */}}
{{- $drafts := printf "strategy!~\"grammar|prediction\", %s" $in -}}
{{- with $alerts.GalleyAcceptanceCollapse }}
{{- if .enabled }}
- alert: GalleyAcceptanceCollapse
  expr: |
    sum by ({{ $by }}) (rate(galley_accepted_tokens_total{ {{- $drafts -}} }[{{ .window }}]))
      / sum by ({{ $by }}) (rate(galley_verified_tokens_total{ {{- $drafts -}} }[{{ .window }}]))
      < {{ .threshold }} * (
        sum by ({{ $by }}) (rate(galley_accepted_tokens_total{ {{- $drafts -}} }[{{ .baselineWindow }}]))
          / sum by ({{ $by }}) (rate(galley_verified_tokens_total{ {{- $drafts -}} }[{{ .baselineWindow }}]))
      )
      and sum by ({{ $by }}) (rate(galley_verified_tokens_total{ {{- $drafts -}} }[{{ .window }}])) > 1
  {{- include "galley.alertFields" (list $ .) | nindent 2 }}
  annotations:
    summary: Acceptance rate of workload {{ `{{ $labels.workload }}` }} has collapsed
    description: >-
      In the last {{ .window }} the acceptance rate of workload {{ `{{ $labels.workload }}` }} was
      {{ `{{ $value | humanizePercentage }}` }}: less than {{ .threshold }} of its mean over {{ .baselineWindow }}.
    {{ include "galley.runbook" (list $ "GalleyAcceptanceCollapse") }}
{{- end }}
{{- end }}
{{- with $alerts.GalleySpeculationNotPaying }}
{{- if .enabled }}
- alert: GalleySpeculationNotPaying
  expr: |
    sum by ({{ $by }}) (rate(galley_plain_time_seconds_total{ {{- $in -}} }[{{ .window }}]))
      / sum by ({{ $by }}) (rate(galley_decode_time_seconds_total{ {{- $in -}} }[{{ .window }}]))
      < {{ .threshold }}
      and sum by ({{ $by }}) (rate(galley_verified_tokens_total{ {{- $in -}} }[10m])) > 1
  {{- include "galley.alertFields" (list $ .) | nindent 2 }}
  annotations:
    summary: Speculation slows workload {{ `{{ $labels.workload }}` }}
    description: >-
      The estimated speed-up of workload {{ `{{ $labels.workload }}` }} over plain decoding is
      {{ `{{ $value | printf "%.2f" }}` }}.
    {{ include "galley.runbook" (list $ "GalleySpeculationNotPaying") }}
{{- end }}
{{- end }}
{{- $of := printf "namespace, %s" (include "galley.releaseLabel" .) -}}
{{- with $alerts.GalleyDraftRolledBack }}
{{- if .enabled }}
- alert: GalleyDraftRolledBack
  expr: |
    sum by ({{ $of }}) (increase(galley_draft_version_decisions_total{decision="rolled_back", {{ $in }}}[{{ .window }}])) > 0
  {{- include "galley.alertFields" (list $ .) | nindent 2 }}
  annotations:
    summary: A version of the draft was rolled back
    description: >-
      In the last {{ .window }} gateways ended the trial of a version of the draft and gave all sessions back to the others. It was
      worse, or failed. Output is the same.
    {{ include "galley.runbook" (list $ "GalleyDraftRolledBack") }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "galley.loadRules" -}}
{{- $alerts := .Values.monitoring.rules.alerts -}}
{{- $in := include "galley.releaseMatchers" . -}}
{{- $by := printf "namespace, %s" (include "galley.releaseLabel" .) -}}
{{- with $alerts.GalleyTargetOutOfBlocks }}
{{- if .enabled }}
- alert: GalleyTargetOutOfBlocks
  expr: |
    sum by ({{ $by }}, instance) (rate(galley_out_of_blocks_total{ {{- $in -}} }[{{ .window }}])) > {{ .threshold }}
  {{- include "galley.alertFields" (list $ .) | nindent 2 }}
  annotations:
    summary: Target {{ `{{ $labels.instance }}` }} runs out of KV blocks
    description: >-
      {{ `{{ $value | humanize }}` }} requests per second are rejected or preempted because no block of the KV pool is free.
    {{ include "galley.runbook" (list $ "GalleyTargetOutOfBlocks") }}
{{- end }}
{{- end }}
{{- with $alerts.GalleyQueueAgeHigh }}
{{- if .enabled }}
- alert: GalleyQueueAgeHigh
  expr: |
    histogram_quantile(
      {{ .quantile }}, sum by ({{ $by }}, instance, le) (rate(galley_queue_age_seconds_bucket{ {{- $in -}} }[{{ .window }}]))
    ) > {{ .threshold }}
  {{- include "galley.alertFields" (list $ .) | nindent 2 }}
  annotations:
    summary: Requests queue too long at target {{ `{{ $labels.instance }}` }}
    description: >-
      The {{ .quantile }} quantile of the time that requests wait for their first step is
      {{ `{{ $value | humanizeDuration }}` }}.
    {{ include "galley.runbook" (list $ "GalleyQueueAgeHigh") }}
{{- end }}
{{- end }}
{{- with $alerts.GalleyCommitSlow }}
{{- if .enabled }}
- alert: GalleyCommitSlow
  expr: |
    histogram_quantile(
      {{ .quantile }}, sum by ({{ $by }}, le) (rate(galley_commit_duration_seconds_bucket{ {{- $in -}} }[{{ .window }}]))
    ) > {{ .threshold }}
  {{- include "galley.alertFields" (list $ .) | nindent 2 }}
  annotations:
    summary: The session store is slow
    description: >-
      The {{ .quantile }} quantile of the duration of commits is {{ `{{ $value | humanizeDuration }}` }}. A token is sent only
      after its commit.
    {{ include "galley.runbook" (list $ "GalleyCommitSlow") }}
{{- end }}
{{- end }}
{{- end -}}

{{/* An audit is rare, and one finding is an incident: the alerts of findings last for a window after it. */}}
{{- define "galley.auditRules" -}}
{{- $alerts := .Values.monitoring.rules.alerts -}}
{{- $in := include "galley.releaseMatchers" . -}}
{{- $by := printf "namespace, %s" (include "galley.releaseLabel" .) -}}
{{- with $alerts.GalleyAuditDiffers }}
{{- if .enabled }}
- alert: GalleyAuditDiffers
  expr: |
    sum by ({{ $by }}) (
      increase(galley_audit_tokens_total{build="deterministic", result="differs", {{ $in }}}[{{ .window }}])
    ) > 0
  {{- include "galley.alertFields" (list $ .) | nindent 2 }}
  annotations:
    summary: An audit computed other tokens than the token log has
    description: >-
      In the last {{ .window }} audits computed {{ `{{ $value | printf "%.0f" }}` }} tokens of deterministic builds otherwise than
      they were logged. Clients may have received wrong tokens.
    {{ include "galley.runbook" (list $ "GalleyAuditDiffers") }}
{{- end }}
{{- end }}
{{- with $alerts.GalleyAuditDamaged }}
{{- if .enabled }}
- alert: GalleyAuditDamaged
  expr: |
    sum by ({{ $by }}) (increase(galley_audit_sessions_total{verdict="damaged", {{ $in }}}[{{ .window }}])) > 0
  {{- include "galley.alertFields" (list $ .) | nindent 2 }}
  annotations:
    summary: An audit read a session that was changed in the store
    description: >-
      In the last {{ .window }} audits read {{ `{{ $value | printf "%.0f" }}` }} stored sessions that do not agree with their
      hash. The store damaged them, or somebody wrote to it.
    {{ include "galley.runbook" (list $ "GalleyAuditDamaged") }}
{{- end }}
{{- end }}
{{- with $alerts.GalleyAuditBehind }}
{{- if .enabled }}
{{- $skipped := printf `sum by (%s) (increase(galley_audit_skipped_total{reason=~"expired|backlog|failed", %s}[%s]))` $by $in .window }}
- alert: GalleyAuditBehind
  expr: |
    {{ $skipped }}
    /
    ({{ $skipped }} + sum by ({{ $by }}) (increase(galley_audit_sessions_total{verdict!="not_compared", {{ $in -}} }[{{ .window }}])))
    > {{ .threshold }}
    and {{ $skipped }} >= {{ .minEvents }}
  {{- include "galley.alertFields" (list $ .) | nindent 2 }}
  annotations:
    summary: Audits do not keep up
    description: >-
      In the last {{ .window }} {{ `{{ $value | humanizePercentage }}` }} of the sessions that were drawn for an audit were dropped
      before a target had time for them, or their audit failed. A fault is found later, or not at all.
    {{ include "galley.runbook" (list $ "GalleyAuditBehind") }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "galley.certificateRules" -}}
{{- $in := include "galley.releaseMatchers" . -}}
{{- with .Values.monitoring.rules.alerts.GalleyCertificateExpires }}
{{- if .enabled }}
{{- range $severity, $days := .days }}
- alert: GalleyCertificateExpires
  expr: |
    galley_tls_certificate_expiry_timestamp_seconds{ {{- $in -}} } - time() < {{ $days }} * 86400
      or galley_tls_peer_certificate_expiry_timestamp_seconds{ {{- $in -}} } - time() < {{ $days }} * 86400
  {{- include "galley.alertFields" (list $ (dict "severity" $severity "for" "5m")) | nindent 2 }}
  annotations:
    summary: A certificate of {{ `{{ $labels.instance }}` }} expires soon
    description: >-
      The certificate of {{ `{{ $labels.instance }}` }} expires in {{ `{{ $value | humanizeDuration }}` }}. Then new
      connections fail.
    {{ include "galley.runbook" (list $ "GalleyCertificateExpires") }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
