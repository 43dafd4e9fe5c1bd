{{/* Refuse Services, accounts and security settings that Kubernetes would refuse. */}}
{{- define "galley.validatePods" -}}
{{- include "galley.validateService" . -}}
{{- include "galley.validateAccounts" . -}}
{{- include "galley.validateHostNetwork" . -}}
{{- $policy := .Values.ipFamilyPolicy -}}
{{- if and (has $policy (list "" "SingleStack")) (gt (len .Values.ipFamilies) 1) -}}
{{- $with := ternary "with ipFamilyPolicy SingleStack" "without ipFamilyPolicy" (eq $policy "SingleStack") -}}
{{- fail (printf "ipFamilies: must be one %s, got %s; or set ipFamilyPolicy to PreferDualStack" $with (join ", " .Values.ipFamilies)) -}}
{{- end -}}
{{- end -}}

{{- define "galley.validateService" -}}
{{- $service := .Values.gateway.service -}}
{{- if eq $service.type "ClusterIP" -}}
{{- range $key := list "nodePort" "httpNodePort" -}}
{{- if get $service $key -}}
{{- fail (printf "gateway.service.%s: must be 0 with gateway.service.type ClusterIP, got %v" $key (get $service $key)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $service.nodePort (eq (int $service.nodePort) (int $service.httpNodePort)) -}}
{{- fail (printf "gateway.service.httpNodePort: must differ from gateway.service.nodePort, got %v" $service.httpNodePort) -}}
{{- end -}}
{{- if ne $service.type "LoadBalancer" -}}
{{- range $key := list "loadBalancerClass" "loadBalancerSourceRanges" -}}
{{- if get $service $key -}}
{{- fail (printf "gateway.service.%s: must be empty with gateway.service.type %s; only LoadBalancer uses it" $key $service.type) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $grpc := include "galley.servicePort" (dict "root" . "way" "grpc") -}}
{{- if and (include "galley.hasHttp" .) (eq $grpc (include "galley.servicePort" (dict "root" . "way" "http"))) -}}
{{- fail (printf "gateway.service.httpPort: must differ from gateway.service.port, got %s" $grpc) -}}
{{- end -}}
{{- end -}}

{{/* Accounts that two roles would create. */}}
{{- define "galley.validateAccounts" -}}
{{- $known := dict -}}
{{- range $role := include "galley.accountRoles" . | fromYamlArray -}}
{{- $it := dict "root" $ "role" $role -}}
{{- if include "galley.createsAccount" $it -}}
{{- $name := include "galley.serviceAccountName" $it -}}
{{- with get $known $name -}}
{{- fail (printf "%s.serviceAccount.create: must be false, because %s.serviceAccount creates one too that is called %s" $role . $name) -}}
{{- end -}}
{{- $_ := set $known $name $role -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* NetworkPolicies neither select pods of the host's network nor admit them by their labels. */}}
{{- define "galley.validateHostNetwork" -}}
{{- $values := .Values -}}
{{- $pods := dict "gateway" $values.gateway "draft" $values.draft "target" $values.target -}}
{{- range $values.drafts -}}{{- $_ := set $pods (printf "drafts[%s]" .name) . -}}{{- end -}}
{{- with $values.draft.canary -}}{{- $_ := set $pods "draft.canary.overrides" .overrides -}}{{- end -}}
{{- $pods = merge $pods (dict "target.rayService.head" $values.target.rayService.head "redis.embedded" $values.redis.embedded "test" $values.test "learning" $values.learning) -}}
{{- if $values.networkPolicy.enabled -}}
{{- range $name, $pod := $pods -}}
{{- if include "galley.onHostNetwork" $pod -}}
{{- fail (printf "networkPolicy.enabled: must be false with %s.hostNetwork, because policies do not know pods of the host's network" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
