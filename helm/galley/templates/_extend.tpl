{{/*
The pods of the chart: what a template renders, then the role's extension points, then its podSpec.

    {{ include "galley.podTemplate" (dict "root" $ "role" "draft" "values" .Values.draft "spec" "galley.draftPod") }}

`spec` names a template that renders a pod's spec from the same dict, and `metadata` one for its metadata (galley.podMetadata).
`container` is the name of the main container (the role). The main container comes first.
*/}}

{{- define "galley.podTemplate" -}}
metadata:
  {{- $own := dict "labels" (.values.podLabels | default dict) "annotations" (.values.podAnnotations | default dict) }}
  {{- $text := include (.metadata | default "galley.podMetadata") . }}
  {{- include "galley.over" (dict "text" $text "over" (list $own)) | nindent 2 }}
spec:
  {{- $rendered := include .spec . }}
  {{- $extensions := include "galley.extensions" (merge (dict "rendered" (fromYaml $rendered)) .) | fromYaml }}
  {{- include "galley.over" (dict "text" $rendered "over" (list $extensions .values.podSpec)) | nindent 2 }}
{{- end -}}

{{/* The extension points of a role as parts of a pod's spec, beside what is `rendered`. */}}
{{- define "galley.extensions" -}}
{{- $values := .values -}}
{{- $pod := dict -}}
{{- range $key := list "runtimeClassName" "schedulerName" "hostNetwork" "dnsPolicy" "dnsConfig" "resourceClaims" -}}
{{- with get $values $key -}}{{- $_ := set $pod $key . -}}{{- end -}}
{{- end -}}
{{- if and $values.hostNetwork (not $values.dnsPolicy) -}}
{{- /* Otherwise pods of the host's network would not resolve Services. */ -}}
{{- $_ := set $pod "dnsPolicy" "ClusterFirstWithHostNet" -}}
{{- end -}}
{{- $_ := set $pod "securityContext" ($values.podSecurityContext | default dict) -}}
{{- $_ := set $pod "volumes" ($values.extraVolumes | default list) -}}
{{- $own := include "galley.containerExtensions" . | fromYaml -}}
{{- $main := merge (dict "name" (.container | default .role)) $own -}}
{{- with $values.lifecycle -}}{{- $_ := set $main "lifecycle" . -}}{{- end -}}
{{- /* Workers of a group have no probes. */ -}}
{{- range $key, $probe := pick $values "startupProbe" "readinessProbe" "livenessProbe" -}}
{{- if hasKey (first $.rendered.containers) $key -}}{{- $_ := set $main $key ($probe | default dict) -}}{{- end -}}
{{- end -}}
{{- range $values.resourceClaims -}}
{{- $claims := append (dig "resources" "claims" list $main) (dict "name" .name) -}}
{{- $_ := set $main "resources" (dict "claims" $claims) -}}
{{- end -}}
{{- $_ := set $pod "containers" (concat (list $main) ($values.extraContainers | default list)) -}}
{{- $init := $values.initContainers | default list -}}
{{- range .rendered.initContainers -}}{{- $init = append $init (merge (dict "name" .name) $own) -}}{{- end -}}
{{- $_ := set $pod "initContainers" $init -}}
{{- toYaml $pod -}}
{{- end -}}

{{/* Extension points of each of the chart's own containers: downloads need a proxy's variables and certificates too. */}}
{{- define "galley.containerExtensions" -}}
{{- $env := ternary list .root.Values.extraEnv (has .role (list "redis" "test")) -}}
{{- $container := dict "env" (concat $env (.values.extraEnv | default list)) -}}
{{- $_ := set $container "volumeMounts" (.values.extraVolumeMounts | default list) -}}
{{- $_ := set $container "securityContext" (.values.securityContext | default dict) -}}
{{- with .values.envFrom -}}{{- $_ := set $container "envFrom" . -}}{{- end -}}
{{- toYaml $container -}}
{{- end -}}

{{/* The YAML `text` with maps merged over it: the text itself, with its comments, if they change nothing. */}}
{{- define "galley.over" -}}
{{- $merged := fromYaml .text -}}
{{- range .over -}}{{- include "galley.merge" (dict "into" $merged "over" (. | default dict)) -}}{{- end -}}
{{- if deepEqual $merged (fromYaml .text) -}}{{- .text -}}{{- else -}}{{- toYaml $merged -}}{{- end -}}
{{- end -}}

{{/*
Merge the map `over` into the map `into`, and render nothing. Maps merge, null removes a key, entries of named lists replace the
entry of the same name (containers merge with it), and everything else is replaced.
*/}}
{{- define "galley.merge" -}}
{{- $into := .into -}}
{{- $named := list "containers" "initContainers" "volumes" "env" "volumeMounts" "ports" "imagePullSecrets" "resourceClaims" "claims" -}}
{{- range $key, $value := .over -}}
{{- if kindIs "invalid" $value -}}
{{- $_ := unset $into $key -}}
{{- else if has $key $named -}}
{{- include "galley.mergeNamed" (dict "into" $into "key" $key "over" $value) -}}
{{- else if and (kindIs "map" $value) $value (not (has $key (list "preStop" "postStart"))) -}}
{{- if not (kindIs "map" (get $into $key)) -}}{{- $_ := set $into $key dict -}}{{- end -}}
{{- include "galley.merge" (dict "into" (get $into $key) "over" $value) -}}
{{- else if or $value (not (kindIs "map" $value)) -}}
{{- $_ := set $into $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Merge the list `over` into the list `key` of `into`. An entry stands where the one that it replaces stood, except for a variable
that refers to others, which must come before it. Further init containers come first.
*/}}
{{- define "galley.mergeNamed" -}}
{{- $key := .key -}}
{{- $id := get (dict "volumeMounts" "mountPath" "ports" "containerPort") $key | default "name" -}}
{{- $first := list -}}
{{- $result := get .into $key | default list -}}
{{- range $entry := .over -}}
{{- $found := false -}}
{{- $known := $result -}}
{{- $result = list -}}
{{- range $known -}}
{{- if ne (get . $id | toString) (get $entry $id | toString) -}}
{{- $result = append $result . -}}
{{- else if has $key (list "containers" "initContainers") -}}
{{- include "galley.merge" (dict "into" . "over" $entry) -}}
{{- $result = append $result . -}}
{{- $found = true -}}
{{- else if not (contains "$(" (get $entry "value" | toString)) -}}
{{- $result = append $result $entry -}}
{{- $found = true -}}
{{- end -}}
{{- end -}}
{{- if and (not $found) (eq $key "initContainers") -}}
{{- $first = append $first $entry -}}
{{- else if not $found -}}
{{- $result = append $result $entry -}}
{{- end -}}
{{- end -}}
{{- with concat $first $result -}}{{- $_ := set $.into $key . -}}{{- end -}}
{{- end -}}
