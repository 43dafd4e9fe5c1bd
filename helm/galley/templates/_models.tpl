{{/* Download of models, by the pod at its start or by an init container. */}}

{{/* The hub token for a server that downloads; empty if init containers download. */}}
{{- define "galley.hubTokenEnv" -}}
{{- with .Values.modelCache.hubToken }}
{{- if and .secretName (not $.Values.modelCache.download.enabled) }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .secretName }}, key: {{ .key }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* The init container that downloads the hub model `model` into the cache; empty unless modelCache.download is on. */}}
{{- define "galley.download" -}}
{{- $values := .root.Values -}}
{{- if and $values.modelCache.download.enabled (include "galley.isHubId" .model) }}
initContainers:
  - name: download
    image: {{ include "galley.image" . }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    command: [python, -m, galley.engine.load.resolve, {{ .model | quote }}]
    securityContext:
      {{- include "galley.containerSecurity" . | nindent 6 }}
    resources:
      {{- toYaml $values.modelCache.download.resources | nindent 6 }}
    {{- $token := $values.modelCache.hubToken }}
    {{- if $token.secretName }}
    env:
      - name: HF_TOKEN
        valueFrom:
          secretKeyRef: {name: {{ $token.secretName }}, key: {{ $token.key }}}
    {{- end }}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      - {name: cache, mountPath: /var/cache/galley}
{{- end }}
{{- end -}}
