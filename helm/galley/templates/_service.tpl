{{/*
A Service with one address a pod: HTTP/2 keeps a connection, so that kube-proxy would pin a client to one pod. It has
the port of the metrics, for a ServiceMonitor. `unready`: pods have a name before they are ready.
*/}}
{{- define "galley.headlessService" -}}
{{- $role := index .root.Values .role -}}
{{- $suffix := ternary "-headless" "" (eq .role "gateway") -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "galley.metadata" (merge (dict "name" (printf "%s%s" (include "galley.roleName" .) $suffix)) .) | nindent 2 }}
    galley-headless: "true"
spec:
  clusterIP: None
  {{- if .unready }}
  # The ranks of a group meet before they are ready.
  publishNotReadyAddresses: true
  {{- end }}
  selector:
    {{- include "galley.selector" . | nindent 4 }}
  ports:
    - {name: grpc, port: {{ $role.port }}, targetPort: grpc, protocol: TCP}
    - {name: metrics, port: {{ $role.metricsPort }}, targetPort: metrics, protocol: TCP}
{{- end -}}
