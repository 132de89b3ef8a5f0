// Package settings fills one struct per program from flags, a YAML file and MARU_*
// variables, in that order of precedence. It knows no program and no setting: a struct's
// fields, with their yaml names, are the settings.
//
// A field `yaml:"http_port"` is the flag --http-port, the YAML key http_port and the
// variable MARU_HTTP_PORT. What the struct holds when it is bound is the default.
// Supported are strings, booleans, integers, floats, time.Duration, lists of strings,
// types with UnmarshalText, and structs of these (`yaml:"tls"` with `yaml:"cert_file"` is
// --tls-cert-file, tls: {cert_file: ...}, MARU_TLS_CERT_FILE). Integers whose Go name ends in
// Bytes are sizes: "4G", "500M", "1.5GiB" or a number of bytes; K, M, G and T are binary.
// Tags: `yaml` gives the name ("-" leaves a field out), `help` the text for people.
//
// All problems are reported at once, each with its place (flag, file and line, or
// variable), the value and what is allowed; a key that does not exist is refused with the
// nearest one that does. Secrets are never settings: a setting names their file, and
// [ReadSecretFile] reads it.
//
// There are no goroutines and no locks; a Set belongs to the goroutine that starts the
// program.
package settings
