{{/*
Models of the Hugging Face hub. Targets and drafts with a model of their own read all of it, the others the tokenizer's files. An
init container of each pod downloads what it reads, or a Job downloads all models into the claim and the init containers wait.
*/}}

{{/* The hub model that the pods of a role read; empty if it comes from a directory. */}}
{{- define "galley.hubModel" -}}
{{- $model := .root.Values.model -}}
{{- if eq .role "draft" -}}
{{- $model = .values.settings.model | default $model -}}
{{- else if eq .role "learning" -}}
{{- $model = include "galley.learningTarget" .root -}}
{{- end -}}
{{- if include "galley.isHubId" $model -}}{{- $model -}}{{- end -}}
{{- end -}}

{{/* The hub models that the pods of a role download, as a JSON list: a trained draft also reads its target's embeddings. */}}
{{- define "galley.hubModelsOf" -}}
{{- $models := list (include "galley.hubModel" .) -}}
{{- if eq .role "draft" -}}
{{- with .values.settings.target_model -}}{{- if include "galley.isHubId" . -}}{{- $models = append $models . -}}{{- end -}}{{- end -}}
{{- end -}}
{{- compact $models | uniq | toJson -}}
{{- end -}}

{{- define "galley.readsHub" -}}
{{- if ne (include "galley.hubModelsOf" .) "[]" }}true{{ end -}}
{{- end -}}

{{/* True if a Job downloads the models. */}}
{{- define "galley.hasDownloadJob" -}}
{{- with .Values.modelCache.download -}}{{- if and .enabled (eq .mode "job") }}true{{ end -}}{{- end -}}
{{- end -}}

{{- define "galley.hubToken" -}}
{{- with .Values.modelCache.hubToken }}
{{- if .secretName }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .secretName }}, key: {{ .key }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* The environment of a server that reads a hub model. */}}
{{- define "galley.hubEnv" -}}
{{- if include "galley.readsHub" . }}
{{- if .root.Values.modelCache.download.enabled }}
# The model is in the cache before the server starts.
- name: HF_HUB_OFFLINE
  value: "1"
{{- else }}
{{- include "galley.hubToken" .root }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The init container that downloads a pod's hub model into the cache, or waits for the Job. */}}
{{- define "galley.download" -}}
{{- $models := include "galley.hubModelsOf" . | fromJsonArray -}}
{{- if and .root.Values.modelCache.download.enabled $models }}
{{- $waits := include "galley.hasDownloadJob" .root -}}
{{- $whole := or (has .role (list "target" "learning")) (and (eq .role "draft") .values.settings.model) -}}
{{- $flag := ternary "--wait" (ternary "" "--tokenizer" (not (not $whole))) (not (not $waits)) }}
initContainers:
  - {{ include "galley.downloader" (merge (dict "arguments" (compact (append $models $flag)) "waits" $waits) .) | nindent 4 | trim }}
{{- end }}
{{- end -}}

{{/* A container named `download`; `waits` for one that only waits. */}}
{{- define "galley.downloader" -}}
{{- $download := .root.Values.modelCache.download -}}
name: download
image: {{ include "galley.image" . }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
command: {{ concat (list "python" "-m" "galley.common.models.download") .arguments | toJson }}
securityContext:
  {{- include "galley.containerSecurity" . | nindent 2 }}
resources:
  {{- toYaml $download.resources | nindent 2 }}
{{- $env := ternary "" (include "galley.hubToken" .root) (not (not .waits)) }}
{{- if .waits }}
env:
  - name: HF_HUB_OFFLINE
    value: "1"
{{- else if $env }}
env:
  {{- $env | nindent 2 }}
{{- end }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: cache, mountPath: /var/cache/galley}
{{- end -}}

{{/* The pod of the Job. */}}
{{- define "galley.downloadPod" -}}
{{ include "galley.podCommon" . }}
restartPolicy: OnFailure
containers:
  - {{ include "galley.downloader" . | nindent 4 | trim }}
volumes:
  {{- include "galley.cacheVolumes" . | nindent 2 }}
{{- end -}}

{{/* Every hub model of the release, as a JSON list. */}}
{{- define "galley.hubModels" -}}
{{- $models := ternary (list .Values.model) list (eq (include "galley.isHubId" .Values.model) "true") -}}
{{- range include "galley.draftPools" . | fromJsonArray -}}
{{- $models = concat $models (include "galley.hubModelsOf" (merge (dict "root" $) .) | fromJsonArray) -}}
{{- end -}}
{{- if .Values.learning.enabled -}}
{{- $learning := dict "root" $ "role" "learning" "values" .Values.learning -}}
{{- $models = concat $models (include "galley.hubModelsOf" $learning | fromJsonArray) -}}
{{- end -}}
{{- uniq $models | toJson -}}
{{- end -}}
