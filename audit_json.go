package edgelimit

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
)

// auditValue is a value in JSON that knows where it stands. The zero value
// stands for what is not there.
type auditValue struct {
	name  string // in the object that it is a member of
	value any
	place spot
}

func (v auditValue) spot() spot { return v.place }

func (v auditValue) exists() bool { return v.value != nil }

// get is a member of an object.
func (v auditValue) get(names ...string) auditValue {
	for _, name := range names {
		object, _ := v.value.(map[string]any)
		v = auditValue{name, object[name], v.place.in(name)}
	}
	return v
}

// members are those of an object, in the order of their names.
func (v auditValue) members() (members []auditValue) {
	object, _ := v.value.(map[string]any)
	for name := range object {
		members = append(members, v.get(name))
	}
	slices.SortFunc(members, func(a, b auditValue) int { return strings.Compare(a.name, b.name) })
	return members
}

// items are those of an array.
func (v auditValue) items() (items []auditValue) {
	array, _ := v.value.([]any)
	for i, item := range array {
		items = append(items, auditValue{v.name, item, v.place.in("[" + strconv.Itoa(i) + "]")})
	}
	return items
}

func (v auditValue) text() string {
	text, _ := v.value.(string)
	return text
}

func (v auditValue) number() int {
	number, _ := v.value.(float64)
	return int(number)
}

func (v auditValue) isTrue() bool { return v.value == true }

// strings are the texts in a value, at any depth, and the names of members.
func (v auditValue) strings() (texts []string) {
	v.everyText(func(text auditValue) { texts = append(texts, text.text()) })
	return texts
}

// everyText calls f for all texts in the value, names of members among them.
func (v auditValue) everyText(f func(auditValue)) {
	switch v.value.(type) {
	case string:
		f(v)
	case []any:
		for _, item := range v.items() {
			item.everyText(f)
		}
	case map[string]any:
		for _, member := range v.members() {
			f(auditValue{member.name, member.name, member.place})
			member.everyText(f)
		}
	}
}

// into decodes the value into a structure.
func (v auditValue) into(target any) error {
	text, err := json.Marshal(v.value)
	if err != nil {
		return err
	}
	return json.Unmarshal(text, target)
}

// matchers reads sets of matchers, of which any is enough.
func (v auditValue) matchers() (matchers []auditMatcher) {
	for _, set := range v.items() {
		for _, m := range set.members() {
			matcher := auditMatcher{spot: m.place, name: m.name, args: m.strings()}
			switch m.name {
			case "not":
				matcher.args, matcher.inner = nil, m.matchers()
			case "header", "header_regexp":
				for _, field := range m.members() {
					matcher.fields = append(matcher.fields, field.name)
				}
			}
			matchers = append(matchers, matcher)
		}
	}
	return matchers
}

// jsonAudit reads Caddy's own JSON.
type jsonAudit struct {
	config *auditConfig
	routes auditValue // named ones of the server
	// as in caddyfileAudit
	invoking []string
	invoked  int
}

// readJSON reads Caddy's JSON into the form that the rules judge.
func readJSON(filename string, content []byte) (*auditConfig, error) {
	root, err := parseJSON(filename, content)
	if err != nil {
		return nil, err
	}
	c := &jsonAudit{config: new(auditConfig)}
	if app := root.get("apps", "edge_limit"); app.exists() {
		c.config.app = c.readApp(app)
	}
	c.config.errorLog = logOfJSON(root.get("logging", "logs", "default"))
	for _, server := range root.get("apps", "http", "servers").members() {
		c.readServer(server, root.get("logging", "logs"))
	}
	return c.config, nil
}

// parseJSON parses JSON whose outermost value is an object, and names the line
// where it is not.
func parseJSON(filename string, content []byte) (auditValue, error) {
	root := auditValue{place: spot{File: filename}}
	if len(bytes.TrimSpace(content)) == 0 {
		return root, fmt.Errorf("%s is empty: there is nothing to audit", filename)
	}
	decoder := json.NewDecoder(bytes.NewReader(content))
	err := decoder.Decode(&root.value)
	if err == nil {
		if _, more := decoder.Token(); more != io.EOF {
			return root, fmt.Errorf("%s:%d: more text follows the configuration", filename, lineAt(content, decoder.InputOffset()))
		}
		if _, ok := root.value.(map[string]any); !ok {
			return root, fmt.Errorf("%s: a configuration is a JSON object, {...}", filename)
		}
		return root, nil
	}
	var syntax *json.SyntaxError
	switch {
	case errors.As(err, &syntax):
		return root, fmt.Errorf("%s:%d: not valid JSON: %w", filename, lineAt(content, syntax.Offset), err)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return root, fmt.Errorf("%s:%d: not valid JSON: it ends too early", filename, lineAt(content, int64(len(content))))
	}
	return root, fmt.Errorf("%s: not valid JSON: %w", filename, err)
}

// lineAt is the line of an offset.
func lineAt(content []byte, offset int64) int {
	return 1 + bytes.Count(content[:min(max(offset, 0), int64(len(content)))], []byte("\n"))
}

func (c *jsonAudit) readServer(v, logs auditValue) {
	s := &auditServer{
		spot:           v.get("trusted_proxies_unix").place,
		strict:         v.get("trusted_proxies_strict").number() > 0,
		unix:           v.get("trusted_proxies_unix").isTrue(),
		logCredentials: v.get("logs", "should_log_credentials").isTrue(),
	}
	if trusted := v.get("trusted_proxies"); trusted.exists() {
		s.trusted, s.spot = []auditRanges{rangesOfJSON(trusted)}, trusted.place
	}
	for _, header := range v.get("client_ip_headers").items() {
		s.headers = append(s.headers, header.text())
	}
	for _, wrapper := range v.get("listener_wrappers").items() {
		if wrapper.get("wrapper").text() == "proxy_protocol" {
			s.proxyProtocol = proxyProtocolOfJSON(wrapper)
		}
	}
	c.config.servers = append(c.config.servers, s)
	c.routes = v.get("named_routes")
	site := &auditSite{
		spot: v.place, name: v.name, listen: v.get("listen").strings(), server: s,
		steps:       c.steps(v.get("routes")),
		errorRoutes: c.steps(v.get("errors", "routes")),
	}
	site.logs = accessLogs(v.get("logs"), logs)
	c.config.sites = append(c.config.sites, site)
}

func rangesOfJSON(v auditValue) auditRanges {
	return auditRanges{spot: v.place, source: v.get("source").text(), ranges: v.get("ranges").strings()}
}

func proxyProtocolOfJSON(v auditValue) (sources []auditRanges) {
	if allow := v.get("allow"); allow.exists() {
		sources = append(sources, auditRanges{spot: allow.place, source: "static", ranges: allow.strings()})
	}
	if policy := v.get("fallback_policy"); usesAnyProxyHeader(policy.text()) {
		sources = append(sources, auditRanges{spot: policy.place, source: "fallback_policy", everyone: true})
	}
	return sources
}

// accessLogs are the logs that a server's access logs are written to: those of
// hosts with a logger of their own, and those of all others.
func accessLogs(server, logs auditValue) (access []auditLog) {
	if !server.exists() {
		return nil
	}
	for _, host := range server.get("logger_names").members() {
		for _, name := range host.strings() {
			for _, l := range logsTaking(logs, "http.log.access."+name) {
				l.host = host.name
				access = append(access, l)
			}
		}
	}
	if !server.get("skip_unmapped_hosts").isTrue() {
		access = append(access, logsTaking(logs, strings.TrimSuffix("http.log.access."+server.get("default_logger_name").text(), "."))...)
	}
	return access
}

// logsTaking are the logs that take what a logger of that name is told.
func logsTaking(logs auditValue, logger string) (taking []auditLog) {
	for _, v := range logs.members() {
		in := func(list string) bool {
			return slices.ContainsFunc(v.get(list).strings(), func(name string) bool {
				return logger == name || strings.HasPrefix(logger, name+".")
			})
		}
		if !in("exclude") && (!v.get("include").exists() || in("include")) {
			taking = append(taking, logOfJSON(v))
		}
	}
	if !logs.get("default").exists() {
		taking = append(taking, auditLog{}) // Caddy's own, which filters nothing
	}
	return taking
}

// logOfJSON reads what a log does not show.
func logOfJSON(v auditValue) auditLog {
	l := auditLog{spot: v.place}
	if v.get("encoder", "format").text() == "filter" {
		for _, field := range v.get("encoder", "fields").members() {
			if field.get("filter").text() != "rename" {
				l.filtered = append(l.filtered, field.name)
			}
		}
	}
	if v.get("writer", "output").text() == "discard" {
		l.filtered = append(l.filtered, "request")
	}
	return l
}

// decoded is raw JSON as a value; nil if it is none.
func decoded(raw json.RawMessage) (value any) {
	_ = json.Unmarshal(raw, &value)
	return value
}
