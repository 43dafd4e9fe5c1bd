{{/*
A Service with one address a pod: HTTP/2 keeps a connection, so that kube-proxy would pin a client to one pod. It has
the port of the metrics, for a ServiceMonitor. (dict "root" $ "role" "draft"), and a "suffix" of its name where the role's
own name is another's.
*/}}
{{- define "galley.headlessService" -}}
{{- $role := index .root.Values .role -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "galley.metadata" (merge (dict "name" (printf "%s%s" (include "galley.roleName" .) (.suffix | default ""))) .) | nindent 2 }}
    galley-headless: "true"
spec:
  clusterIP: None
  selector:
    {{- include "galley.selector" . | nindent 4 }}
  ports:
    - {name: grpc, port: {{ $role.port }}, targetPort: grpc, protocol: TCP}
    - {name: metrics, port: {{ $role.metricsPort }}, targetPort: metrics, protocol: TCP}
{{- end -}}
