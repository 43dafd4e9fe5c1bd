{{/* Refuse ways into the cluster that cannot work. */}}
{{- define "galley.validateEdge" -}}
{{- $tls := .Values.tls -}}
{{- $asks := and $tls.enabled $tls.gateway.clientCaSecretName -}}
{{- if and $tls.enabled (not $tls.certManager.enabled) -}}
{{- range $role := ternary (list "gateway" "target" "draft") (list "gateway" "target") .Values.draft.enabled -}}
{{- if not (index $tls $role).secretName -}}
{{- fail (printf "tls.%s.secretName: must be set with tls.enabled, or set tls.certManager.enabled=true" $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $tls.enabled (include "galley.isPublic" .) -}}
{{- if not $tls.gateway.name -}}
{{- fail "tls.gateway.name: must be set with tls.gateway.publicAuthority or tls.certManager.publicIssuerRef, because public authorities do not sign names of Services" -}}
{{- end -}}
{{- if eq (include "galley.peerSecret" .) (include "galley.tlsSecret" (dict "root" . "role" "gateway")) -}}
{{- fail "tls.gateway.peerSecretName: must name another Secret with tls.gateway.publicAuthority, because that of a public authority has no ca.crt" -}}
{{- end -}}
{{- end -}}
{{- if and $tls.certManager.enabled (not $tls.enabled) -}}
{{- fail "tls.certManager.enabled: must be false without tls.enabled, because no certificate would be used" -}}
{{- end -}}
{{- $manager := $tls.certManager -}}
{{- if ge (trimSuffix "h" $manager.renewBefore | int64) (trimSuffix "h" $manager.duration | int64) -}}
{{- fail (printf "tls.certManager.renewBefore: must be less than tls.certManager.duration (%s), got %s" $manager.duration $manager.renewBefore) -}}
{{- end -}}
{{- if and $tls.gateway.dnsNames (not $tls.certManager.enabled) -}}
{{- fail "tls.gateway.dnsNames: must be empty without tls.certManager.enabled, because the chart asks for no certificate" -}}
{{- end -}}
{{- if and $asks .Values.test.enabled (not .Values.test.clientCertSecretName) -}}
{{- fail "test.clientCertSecretName: must be set with tls.gateway.clientCaSecretName, because the gateway takes no caller without a certificate; or set test.enabled=false" -}}
{{- end -}}
{{- $ingress := .Values.ingress -}}
{{- range $key := list "hosts" "tls" -}}
{{- if and $ingress.enabled (not (get $ingress $key)) -}}
{{- fail (printf "ingress.%s: must name at least one with ingress.enabled, got none" $key) -}}
{{- end -}}
{{- end -}}
{{- $presented := merge (dict) $ingress.annotations $ingress.grpc.annotations $ingress.grpc.serviceAnnotations $ingress.http.annotations .Values.gateway.service.annotations | keys | join " " -}}
{{- if and $ingress.enabled $asks (not (regexMatch "/(proxy-ssl-secret|server-crt|secure-crt-secret|service\\.serverstransport)\\b" $presented)) -}}
{{- fail "ingress.enabled: must be false with tls.gateway.clientCaSecretName, because the controller ends the callers' TLS and presents no certificate of its own; or let it present one by annotation (docs/operate/ingress.md#a-gateway-that-asks-for-certificates)" -}}
{{- end -}}
{{- include "galley.validateRoutes" . -}}
{{- end -}}

{{- define "galley.validateRoutes" -}}
{{- $api := .Values.gatewayApi -}}
{{- if and $api.enabled (not $api.parentRefs) -}}
{{- fail "gatewayApi.parentRefs: must name at least one Gateway with gatewayApi.enabled, got none" -}}
{{- end -}}
{{- $tls := .Values.tls -}}
{{- $pool := .Values.inferencePool -}}
{{- $hasHttp := include "galley.hasHttp" . -}}
{{- range $host := $api.http.hostnames -}}
{{- if and (has $host $api.hostnames) (not (include "galley.pickerOf" (dict "root" $ "way" "grpc"))) -}}
{{- fail (printf "gatewayApi.http.hostnames: must not contain %s of gatewayApi.hostnames; a GRPCRoute and an HTTPRoute cannot share a hostname" $host) -}}
{{- end -}}
{{- end -}}
{{- if and $api.enabled $api.http.hostnames (not $api.hostnames) (not (include "galley.pickerOf" (dict "root" $ "way" "grpc"))) -}}
{{- fail "gatewayApi.hostnames: must name hosts with gatewayApi.http.hostnames; a GRPCRoute without hostnames is for those of the HTTPRoute too" -}}
{{- end -}}
{{- if and $api.http.hostnames (not $hasHttp) -}}
{{- fail "gatewayApi.http.hostnames: must be empty with gateway.httpPort -1, which closes the HTTP port" -}}
{{- end -}}
{{- $policy := $api.backendTlsPolicy -}}
{{- if and $api.enabled $policy.enabled (not $tls.enabled) -}}
{{- fail "gatewayApi.backendTlsPolicy.enabled: must be false without tls.enabled, because the gateway then speaks plain text" -}}
{{- end -}}
{{- if and $api.enabled $policy.enabled (not (include "galley.isPublic" .)) (not $policy.ca.name) -}}
{{- fail "gatewayApi.backendTlsPolicy.ca.name: must name an object with ca.crt, unless the authority is public (tls.gateway.publicAuthority)" -}}
{{- end -}}
{{- if $pool.enabled -}}
{{- if $tls.enabled -}}
{{- fail "inferencePool.enabled: must be false with tls.enabled, because an InferencePool speaks only plain HTTP and h2c to gateways" -}}
{{- end -}}
{{- if not (or $pool.http.endpointPicker.name $pool.grpc.endpointPicker.name) -}}
{{- fail "inferencePool.http.endpointPicker.name, inferencePool.grpc.endpointPicker.name: must have at least one set with inferencePool.enabled" -}}
{{- end -}}
{{- if and $pool.http.endpointPicker.name (not $hasHttp) -}}
{{- fail "inferencePool.http.endpointPicker.name: must be empty with gateway.httpPort -1, which closes the HTTP port" -}}
{{- end -}}
{{- end -}}
{{- end -}}
