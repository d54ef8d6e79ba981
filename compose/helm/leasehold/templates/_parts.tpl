{{/* The parts that several manifests share. `.part` is coordinator, migrate or agent; `.root` is the root context. */}}

{{- define "leasehold.name" -}}
{{ printf "%s-%s" .root.Release.Name .part | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "leasehold.selector" -}}
app.kubernetes.io/name: leasehold
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "leasehold.labels" -}}
{{ include "leasehold.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{- define "leasehold.podSecurity" -}}
automountServiceAccountToken: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "leasehold.image" -}}
image: "{{ .root.Values.image.repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}"
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Secrets are files, which the services read again when they change. */}}
{{- define "leasehold.secretEnvironment" -}}
{{- range (index .root.Values .part).secrets }}
- name: LEASEHOLD_{{ upper $.part }}_{{ . }}_FILE
  value: /etc/leasehold/secrets/{{ . }}
{{- end }}
{{- end }}

{{- define "leasehold.settings" -}}
{{- range $name, $value := (index .root.Values .part).settings }}
- name: LEASEHOLD_{{ upper $.part }}_{{ $name }}
  value: {{ if kindIs "float64" $value }}{{ printf "%.0f" $value | quote }}{{ else }}{{ $value | toString | quote }}{{ end }}
{{- end }}
{{- end }}

{{- define "leasehold.mounts" -}}
- {name: secrets, mountPath: /etc/leasehold/secrets, readOnly: true}
- {name: temporary, mountPath: /tmp}
{{- end }}

{{- define "leasehold.volumes" -}}
{{- $values := index .root.Values .part -}}
- name: secrets
  secret:
    secretName: {{ $values.secret }}
    defaultMode: 0440
    items:
      {{- range $values.secrets }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
- name: temporary
  emptyDir: {}
{{- end }}

{{- define "leasehold.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 2
  failureThreshold: 30
livenessProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 2
  timeoutSeconds: 3
  failureThreshold: 2
{{- end }}

{{- define "leasehold.placement" -}}
{{- $values := index .root.Values .part -}}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "leasehold.spread" -}}
topologySpreadConstraints:
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "leasehold.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
