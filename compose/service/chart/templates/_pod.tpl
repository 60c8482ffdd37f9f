{{- define "cdc.labels" -}}
app.kubernetes.io/name: cdc
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "cdc.annotations" -}}
# A changed pipeline file starts new pods. A changed Secret needs none: its files are read again.
checksum/pipeline: {{ .Values.pipeline | sha256sum }}
{{- end }}

{{- define "cdc.pod" -}}
serviceAccountName: {{ .Values.serviceAccount }}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
volumes:
  - name: pipeline
    configMap: {name: {{ .Release.Name }}-pipeline}
  - name: secrets
    secret: {secretName: {{ .Values.secret }}, defaultMode: 0440}
  - name: tmp
    emptyDir: {}
  {{- with .Values.warehouseClaim }}
  - name: warehouse
    persistentVolumeClaim: {claimName: {{ . }}}
  {{- end }}
{{- end }}

{{- define "cdc.container" -}}
image: {{ .Values.image }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- with .Values.env }}
env:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  - {name: pipeline, mountPath: /etc/cdc, readOnly: true}
  - {name: secrets, mountPath: /run/secrets, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  {{- if .Values.warehouseClaim }}
  - {name: warehouse, mountPath: /warehouse}
  {{- end }}
{{- end }}
