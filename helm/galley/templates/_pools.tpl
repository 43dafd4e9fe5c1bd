{{/*
The pools of a release: gateways, drafts and targets. `draft` alone is one pool. With `drafts` each entry is a pool, laid over
`draft`, and its objects have its name. draft.canary is one more pool, with a component of its own: the selectors of the pool
`draft`, which cannot be changed, would choose its pods too.
*/}}

{{/*
A JSON list of {role, values, path}, with `component` if its objects are not called by the role; `path` is where the values are.
Drafts are left out if they are off.
*/}}
{{- define "galley.pools" -}}
{{- $pools := list (dict "role" "gateway" "path" "gateway" "values" .Values.gateway) -}}
{{- if and .Values.draft.enabled (not .Values.drafts) -}}
{{- $pools = append $pools (dict "role" "draft" "path" "draft" "values" .Values.draft) -}}
{{- else if .Values.draft.enabled -}}
{{- range .Values.drafts -}}
{{- $values := deepCopy $.Values.draft -}}
{{- include "galley.merge" (dict "into" $values "over" .) -}}
{{- $_ := set $values "settings" ($values.settings | default dict) -}}
{{- $pools = append $pools (dict "role" "draft" "path" (printf "drafts[%s]" .name) "values" $values) -}}
{{- end -}}
{{- end -}}
{{- if include "galley.hasCanary" . -}}
{{- $off := dict "enabled" false -}}
{{- $values := merge (dict "autoscaling" $off "keda" $off) (omit (deepCopy .Values.draft) "autoscaling" "canary") -}}
{{- include "galley.merge" (dict "into" $values "over" .Values.draft.canary.overrides) -}}
{{- $_ := set $values "settings" (merge (dict "version" .Values.draft.canary.version) ($values.settings | default dict)) -}}
{{- $pools = append $pools (dict "role" "draft" "component" "draft-canary" "path" "draft.canary.overrides" "values" $values) -}}
{{- end -}}
{{- append $pools (dict "role" "target" "path" "target" "values" .Values.target) | toJson -}}
{{- end -}}

{{/* True if a canary of the drafts runs. */}}
{{- define "galley.hasCanary" -}}
{{- if and .Values.draft.enabled (.Values.draft.canary).enabled }}true{{ end -}}
{{- end -}}

{{/* The components of the pods of drafts, as a JSON list. */}}
{{- define "galley.draftComponents" -}}
{{- $draft := ternary (list "draft") list .Values.draft.enabled -}}
{{- ternary (append $draft "draft-canary") $draft (eq (include "galley.hasCanary" .) "true") | toJson -}}
{{- end -}}

{{/* The pools of drafts. */}}
{{- define "galley.draftPools" -}}
{{- $drafts := list -}}
{{- range include "galley.pools" . | fromJsonArray -}}{{- if eq .role "draft" -}}{{- $drafts = append $drafts . -}}{{- end -}}{{- end -}}
{{- toJson $drafts -}}
{{- end -}}

{{/* The values by which KEDA scales a pool, as JSON. */}}
{{- define "galley.kedaOf" -}}
{{- mergeOverwrite (deepCopy (index .root.Values.keda .role | default dict)) (.values.keda | default dict) | toJson -}}
{{- end -}}

{{- define "galley.validatePools" -}}
{{- $names := list -}}
{{- range .Values.drafts -}}{{- $names = append $names .name -}}{{- end -}}
{{- if ne (len $names) (len (uniq $names)) -}}
{{- fail (printf "drafts: names must differ, got %s" (join ", " $names)) -}}
{{- end -}}
{{- if and .Values.drafts (not .Values.draft.enabled) -}}
{{- fail "drafts: must be empty with draft.enabled false" -}}
{{- end -}}
{{- range include "galley.draftPools" . | fromJsonArray -}}
{{- if and .values.settings.max_load_mib (not .values.settings.model) -}}
{{- fail (printf "%s.settings.max_load_mib: must be 0 without %s.settings.model, whose weights others replace" .path .path) -}}
{{- end -}}
{{- end -}}
{{- if (.Values.draft.canary).enabled -}}{{- include "galley.validateCanary" . -}}{{- end -}}
{{- end -}}

{{- define "galley.validateCanary" -}}
{{- $version := .Values.draft.canary.version -}}
{{- if not .Values.draft.enabled -}}
{{- fail "draft.canary.enabled: must be false with draft.enabled false" -}}
{{- end -}}
{{- if .Values.gateway.settings.draft_split -}}
{{- fail "gateway.settings.draft_split: must be empty with draft.canary.enabled, which sets it" -}}
{{- end -}}
{{- range .Values.drafts -}}
{{- if eq .name "canary" -}}
{{- fail "drafts[canary].name: must not be canary with draft.canary.enabled, whose objects are called so" -}}
{{- end -}}
{{- end -}}
{{- range include "galley.draftPools" . | fromJsonArray -}}
{{- if and (not .component) (eq (.values.settings.version | default "") $version) -}}
{{- fail (printf "draft.canary.version: must differ from %s.settings.version, got %s" .path $version) -}}
{{- end -}}
{{- end -}}
{{- end -}}
