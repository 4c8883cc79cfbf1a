package edgelimit

import (
	"regexp"
	"slices"
	"strings"
)

// placeholderPattern finds placeholders in text.
var placeholderPattern = regexp.MustCompile(`\{([\w%?][\w.\-/%?]*)\}`)

// placeholdersIn lists the names of the placeholders in text.
func placeholdersIn(text string) (names []string) {
	for _, match := range placeholderPattern.FindAllStringSubmatch(text, -1) {
		names = append(names, match[1])
	}
	return names
}

// keyWriter says who writes a part of another limiter's key.
type keyWriter int

const (
	writerUnknown   keyWriter = iota
	writerCaller              // can be renewed at will
	writerPeer                // the address of the connection
	writerClientIP            // what Caddy takes for the client
	writerForwarded           // the leftmost entry of X-Forwarded-For, from anybody
	writerUser                // set once somebody has logged in
	writerHost                // the caller, but a site takes its own hosts only
)

// writersOfOthers is by prefix of the placeholder; the first that fits counts.
var writersOfOthers = []struct {
	prefix string
	writer keyWriter
}{
	{"http.vars.client_ip", writerClientIP},
	{"http.request.client_ip", writerClientIP},
	{"http.request.remote.ip", writerForwarded},
	{"remote.ip", writerForwarded},
	{"http.request.remote.host", writerPeer},
	{"remote.host", writerPeer},
	{"http.request.remote", writerCaller}, // with a port: new with each connection
	{"remote.port", writerCaller},
	{"http.request.host", writerHost},
	{"http.request.port", writerUnknown},
	{"http.request.scheme", writerUnknown},
	{"http.request.proto", writerUnknown},
	{"http.request.local", writerUnknown},
	{"http.request.duration", writerUnknown},
	{"http.request.tls", writerUnknown}, // whether it is verified is said elsewhere
	{"http.request.", writerCaller},
	{"body.", writerCaller},
	{"http.auth.user.", writerUser},
}

func writerOf(placeholder string) keyWriter {
	for _, known := range writersOfOthers {
		if strings.HasPrefix(placeholder, known.prefix) {
			return known.writer
		}
	}
	return writerUnknown
}

// isUnknown says whether Caddy has no such placeholder, so that it stands for
// nothing. Placeholders of other plugins, and those that a map makes, are not
// judged; short ones are known to the plugin that reads them itself.
func isUnknown(name string, short bool) bool {
	own := []string{"remote.", "body.", "http.request.remote.ip", "http.request.remote.host_prefix."}
	if slices.ContainsFunc(own, func(family string) bool { return strings.HasPrefix(name, family) }) {
		return !short
	}
	if name == "remote_ip" {
		return true
	}
	return strings.HasPrefix(name, "http.request.") && !slices.Contains(requestPlaceholders, name) &&
		!slices.ContainsFunc(requestPlaceholderFamilies, func(family string) bool { return strings.HasPrefix(name, family) })
}

// requestPlaceholders are what Caddy knows of a request, by full name.
var requestPlaceholders = strings.Fields(`
	http.request.method http.request.scheme http.request.proto http.request.proto_name
	http.request.host http.request.port http.request.hostport
	http.request.local http.request.local.host http.request.local.port
	http.request.remote http.request.remote.host http.request.remote.port
	http.request.uri http.request.uri_escaped http.request.uri.path http.request.uri.path_escaped
	http.request.uri.path.file http.request.uri.path.dir http.request.uri.path.file.base http.request.uri.path.file.ext
	http.request.uri.query http.request.uri.query_escaped http.request.uri.prefixed_query
	http.request.duration http.request.duration_ms http.request.uuid http.request.body http.request.body_base64
	http.request.orig_method http.request.orig_uri http.request.orig_uri.path http.request.orig_uri.path.file
	http.request.orig_uri.path.file_escaped http.request.orig_uri.path.dir http.request.orig_uri.query
	http.request.orig_uri.prefixed_query`)

// requestPlaceholderFamilies are those that go on with a name of one's own.
var requestPlaceholderFamilies = []string{
	"http.request.header.", "http.request.cookie.", "http.request.uri.query.", "http.request.uri.path.",
	"http.request.orig_uri.path.", "http.request.host.labels.", "http.request.tls.", "http.request.remote.host/",
	"http.request.body.", // of another plugin
}

// shortName is a placeholder's name as people write it.
func shortName(name string) string {
	if name == "http.request.remote.host" {
		return "remote_host"
	}
	if rest, ok := strings.CutPrefix(name, "http.request."); ok {
		return rest
	}
	return strings.TrimPrefix(name, "http.vars.")
}
