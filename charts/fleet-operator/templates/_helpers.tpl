{{/* The name of the release's objects in its namespace. */}}
{{- define "fleet-operator.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The beginning of the names of cluster-wide objects: releases in two namespaces may have the same name. */}}
{{- define "fleet-operator.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "fleet-operator.fullname" .) -}}
{{- end -}}

{{/*
The name of the role of an operator that serves FleetJobs. It is the same in every release, so Helm refuses a second
release that would serve the same jobs: each of the two operators would undo what the other does.
*/}}
{{- define "fleet-operator.serving" -}}
fleetjob.dev:operator
{{- end -}}

{{- define "fleet-operator.serviceName" -}}
{{ include "fleet-operator.fullname" . | trunc 55 | trimSuffix "-" }}-metrics
{{- end -}}

{{- define "fleet-operator.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* Labels of the pod of `helm test`, by which the operator's NetworkPolicy admits it. */}}
{{- define "fleet-operator.testLabels" -}}
app.kubernetes.io/component: test
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* Labels of every object. The chart's own take precedence over commonLabels: selectors depend on them. */}}
{{- define "fleet-operator.labels" -}}
{{- $own := include "fleet-operator.selectorLabels" . | fromYaml -}}
{{- $_ := set $own "app.kubernetes.io/version" .Chart.AppVersion -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" .Release.Service -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63) -}}
{{- toYaml (merge $own .Values.commonLabels) -}}
{{- end -}}

{{- define "fleet-operator.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "fleet-operator.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is required when serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "fleet-operator.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Who owns an object of the cluster (`found`), as a phrase; empty if it does not exist or belongs to this release (`root`).
*/}}
{{- define "fleet-operator.otherOwner" -}}
{{- with .found -}}
{{- $annotations := .metadata.annotations | default dict -}}
{{- $namespace := get $annotations "meta.helm.sh/release-namespace" -}}
{{- $name := get $annotations "meta.helm.sh/release-name" -}}
{{- if not $name -}}
an installation without Helm
{{- else if or (ne $namespace $.root.Release.Namespace) (ne $name $.root.Release.Name) -}}
the release {{ $name }} in the namespace {{ $namespace }}
{{- end -}}
{{- end -}}
{{- end -}}
