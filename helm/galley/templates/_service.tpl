{{/*
A headless Service, with one address per pod: clients keep one HTTP/2 connection, so kube-proxy would pin each to one
pod. It has the metrics port for a ServiceMonitor. "suffix" is added to its name if
another Service has the role's name.
*/}}
{{- define "galley.headlessService" -}}
{{- $role := .values -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "galley.metadata" (merge (dict "name" (printf "%s%s" (include "galley.roleName" .) (.suffix | default ""))) .) | nindent 2 }}
    galley-headless: "true"
spec:
  clusterIP: None
  {{- include "galley.ipFamilies" .root | nindent 2 }}
  selector:
    {{- include "galley.selector" . | nindent 4 }}
  ports:
    - {name: grpc, port: {{ $role.port }}, targetPort: grpc, protocol: TCP}
    - {name: metrics, port: {{ $role.metricsPort }}, targetPort: metrics, protocol: TCP}
{{- end -}}

{{/* Families of addresses of every Service; empty leaves them to the cluster. */}}
{{- define "galley.ipFamilies" -}}
{{- with .Values.ipFamilyPolicy }}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- with .Values.ipFamilies }}
ipFamilies:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The port of the gateway's Service for one way in: the one named, or the pods'. (dict "root" $ "way" "http") */}}
{{- define "galley.servicePort" -}}
{{- $key := ternary "httpPort" "port" (eq .way "http") -}}
{{- $gateway := .root.Values.gateway -}}
{{- get $gateway.service $key | default (get $gateway $key) | int -}}
{{- end -}}
