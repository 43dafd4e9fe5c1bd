{{/*
The pools of a release: gateways, drafts and targets. `draft` alone is one pool. With `drafts` each entry is a pool, laid over
`draft`, and its objects have its name.
*/}}

{{/* A JSON list of {role, values, path}; `path` is where the values are. Drafts are left out if they are off. */}}
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
{{- append $pools (dict "role" "target" "path" "target" "values" .Values.target) | toJson -}}
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
{{- end -}}
