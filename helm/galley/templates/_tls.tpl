{{/* Secrets of certificates, and what cert-manager is asked to put into them. Helpers take (dict "root" $ "role" "gateway"). */}}

{{/* Of the role, not of one of its pools: they have one certificate. */}}
{{- define "galley.tlsSecret" -}}
{{- (index .root.Values.tls .role).secretName | default (printf "%s-tls" (include "galley.roleName" (pick . "root" "role"))) -}}
{{- end -}}

{{/* Secret that the gateway uses towards drafts and targets. */}}
{{- define "galley.peerSecret" -}}
{{- $it := dict "root" . "role" "gateway" -}}
{{- $named := .Values.tls.gateway.peerSecretName -}}
{{- if and (not $named) .Values.tls.certManager.enabled (include "galley.isPublic" .) -}}
{{- $named = printf "%s-peer-tls" (include "galley.roleName" $it) -}}
{{- end -}}
{{- $named | default (include "galley.tlsSecret" $it) -}}
{{- end -}}

{{/* True if callers trust the gateway's certificate without ca.crt. */}}
{{- define "galley.isPublic" -}}
{{- $tls := .Values.tls -}}
{{- if or $tls.gateway.publicAuthority (and $tls.certManager.enabled $tls.certManager.publicIssuerRef.name) }}true{{ end -}}
{{- end -}}

{{/* The issuer of all certificates but that of a public authority. */}}
{{- define "galley.issuerRef" -}}
{{- $own := .Values.tls.certManager.issuerRef -}}
{{- toYaml (ternary $own (dict "name" (printf "%s-ca" (include "galley.name" .)) "kind" "Issuer" "group" "cert-manager.io") (not (empty $own.name))) -}}
{{- end -}}

{{/* Names in the certificate that callers see. The chart's own authority also signs the names of the Services. */}}
{{- define "galley.gatewayNames" -}}
{{- $it := dict "root" . "role" "gateway" -}}
{{- $names := concat (list (include "galley.tlsName" $it)) .Values.tls.gateway.dnsNames -}}
{{- if not (or .Values.tls.certManager.issuerRef.name (include "galley.isPublic" .)) -}}
{{- range $suffix := list "" "-headless" -}}
{{- $service := printf "%s%s" (include "galley.roleName" $it) $suffix -}}
{{- range $domain := list "" (printf ".%s" $.Release.Namespace) (printf ".%s.svc" $.Release.Namespace) -}}
{{- $names = append $names (printf "%s%s" $service $domain) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml (uniq $names) -}}
{{- end -}}

{{/* A Certificate. (dict "root" $ "role" "gateway" "secret" … "names" "- …" "issuer" "name: …" "usages" (list …)) */}}
{{- define "galley.certificate" -}}
{{- $manager := .root.Values.tls.certManager -}}
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  {{- include "galley.metadata" (merge (dict "name" .secret) .) | nindent 2 }}
spec:
  secretName: {{ .secret }}
  dnsNames:
    {{- .names | nindent 4 }}
  duration: {{ $manager.duration }}
  renewBefore: {{ $manager.renewBefore }}
  privateKey: {algorithm: ECDSA, size: 256, rotationPolicy: Always}
  usages:
    {{- toYaml (concat (list "digital signature") .usages) | nindent 4 }}
  issuerRef:
    {{- .issuer | nindent 4 }}
{{- end -}}
