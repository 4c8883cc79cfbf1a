package edgelimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
)

func TestModulesAreRegistered(t *testing.T) {
	for id, want := range map[string]any{
		"admin.api.edge_limit":           new(Admin),
		"edge_limit":                     new(App),
		"http.handlers.edge_limit":       new(Handler),
		"http.handlers.edge_limit_probe": new(Probe),
	} {
		info, err := caddy.GetModule(id)
		if err != nil {
			t.Error(err)
			continue
		}
		if got := info.New(); !reflect.DeepEqual(got, want) {
			t.Errorf("%s makes %#v, want %#v", id, got, want)
		}
		if got := info.New().CaddyModule().ID; string(got) != id {
			t.Errorf("%s makes a module that calls itself %s", id, got)
		}
	}
}

// jsonConfig is a configuration with this app and these handlers, in one route
// each. An app of "" is none.
func jsonConfig(t *testing.T, app string, handlers ...string) []byte {
	t.Helper()
	apps := make(map[string]any)
	if app != "" {
		apps["edge_limit"] = json.RawMessage(app)
	}
	var routes []any
	for _, handler := range handlers {
		var fields map[string]json.RawMessage // numbers stay as they are written
		if err := json.Unmarshal([]byte(handler), &fields); err != nil {
			t.Fatalf("%s: %v", handler, err)
		}
		if fields["handler"] == nil {
			fields["handler"] = json.RawMessage(`"edge_limit"`)
		}
		routes = append(routes, map[string]any{"handle": []any{fields}})
	}
	if routes != nil {
		apps["http"] = map[string]any{"servers": map[string]any{"site": map[string]any{
			"listen": []string{"127.0.0.1:0"}, "routes": routes,
		}}}
	}
	return caddyconfig.JSON(map[string]any{
		"admin":   map[string]any{"disabled": true, "config": map[string]any{"persist": false}},
		"storage": map[string]any{"module": "file_system", "root": t.TempDir()},
		"apps":    apps,
	}, nil)
}

// Mistakes in the options are the same ones for the app and a handler.
var mistakenOptions = []struct {
	name    string
	options string
	want    string
}{
	{"unresolved unknown", `"unresolved": "allow"`, `unresolved "allow": must be share, deny or exempt`},
	{"unresolved in capitals", `"unresolved": "Deny"`, `unresolved "Deny": must be share, deny or exempt`},
	{"ratelimit_headers unknown", `"ratelimit_headers": "on"`, `ratelimit_headers "on": must be off, ietf or x`},
	{"forward off and more", `"forward": ["off", "X-Real-IP"]`, "forward off leaves all as it came"},
	{"forward more and off", `"forward": ["X-Real-IP", "off"]`, "forward off leaves all as it came"},
	{"forward X-Forwarded-For", `"forward": ["x-forwarded-for"]`, "X-Forwarded-For always gets the client"},
	{"forward no header", `"forward": ["X Real IP"]`, `forward: "X Real IP" is no name of a header`},
	{"forward empty", `"forward": [""]`, `forward: "" is no name of a header`},
	{"strip no header", `"strip": ["X-Visitor:"]`, `strip: "X-Visitor:" is no name of a header`},
	{"forward the message's own", `"forward": ["Host"]`, `forward: Host belongs to the message itself`},
	{"strip the message's own", `"strip": ["connection"]`, `strip: connection belongs to the message itself`},
	{"strip empty", `"strip": [""]`, `strip: "" is no name of a header`},

	{"connection and more", `"client": {"connection": true, "hops": 1}`, "nothing stands in front"},
	{"connection and proof", `"client": {"connection": true, "proof": {"header": "X-Proof", "secrets": ["a secret"]}}`, "nothing stands in front"},
	{"header no header", `"client": {"header": "X Real IP"}`, `header "X Real IP" is no name of a header`},
	{"hops negative", `"client": {"trusted_proxies_unix": true, "hops": -1}`, "hops -1: must be from 1 to 64"},
	{"hops 65", `"client": {"trusted_proxies_unix": true, "hops": 65}`, "hops 65: must be from 1 to 64"},
	{"hops without trusted proxies", `"client": {"hops": 2}`, "add trusted_proxies (or trusted_proxies_unix) to the same client block"},
	{"hops with a proof only", `"client": {"hops": 2, "proof": {"header": "X-Proof", "secrets": ["a secret"]}}`, "add trusted_proxies (or trusted_proxies_unix) to the same client block"},
	{"hops and single_value", `"client": {"trusted_proxies_unix": true, "hops": 1, "single_value": true}`, "hops and single_value exclude each other"},
	{"unverified without hops", `"client": {"trusted_proxies_unix": true, "unverified": true}`, "write hops <n> unverified"},
	{"single_value without trusted proxies", `"client": {"single_value": true}`, "add trusted_proxies (or trusted_proxies_unix) to the same client block"},
	{"trusted_proxies of an unknown module", `"client": {"trusted_proxies": [{"source": "cloud"}]}`, "http.ip_sources.cloud"},
	{"trusted_proxies without a module", `"client": {"trusted_proxies": [{"ranges": ["10.0.0.0/8"]}]}`, "source"},
	{"trusted_proxies no range", `"client": {"trusted_proxies": [{"source": "static", "ranges": ["10.0.0.0/33"]}]}`, "10.0.0.0/33"},

	{"proof without a header", `"client": {"proof": {"secrets": ["a secret"]}}`, `proof: what follows the word is no name of a header`},
	{"proof no header", `"client": {"proof": {"header": "X Proof", "secrets": ["a secret"]}}`, `proof: what follows the word is no name of a header`},
	{"proof without a secret", `"client": {"proof": {"header": "X-Proof"}}`, "write proof <header> {env.NAME}"},
	{"proof with an empty secret", `"client": {"proof": {"header": "X-Proof", "secrets": ["a secret", ""]}}`, "an empty secret would let everybody in"},
	{"proof with a blank secret", `"client": {"proof": {"header": "X-Proof", "secrets": ["  "]}}`, "an empty secret would let everybody in"},
	{"proof with a variable that is not set", `"client": {"proof": {"header": "X-Proof", "secrets": ["{env.EDGE_LIMIT_TEST_IS_NOT_SET}"]}}`, "{env.EDGE_LIMIT_TEST_IS_NOT_SET} is empty"},
	{"proof with a file that is not there", `"client": {"proof": {"header": "X-Proof", "secrets": ["{file./does/not/exist}"]}}`, "{file./does/not/exist}"},
	{"proof with one header for both", `"client": {"proof": {"header": "X_Client_IP", "secrets": ["a secret"]}}`, "the secret and the client need a header each"},
	{"client_header no header", `"client": {"proof": {"header": "X-Proof", "client_header": "X IP", "secrets": ["a secret"]}}`, `client_header "X IP" is no name of a header`},
	{"a field that is not known", `"client": {"trusted_proxy": []}`, "trusted_proxy"},
}

func TestMistakenOptionsInJSON(t *testing.T) {
	for _, test := range mistakenOptions {
		t.Run("app/"+test.name, func(t *testing.T) {
			requireRefused(t, jsonConfig(t, "{"+test.options+"}"), "edge_limit", test.want)
		})
		t.Run("handler/"+test.name, func(t *testing.T) {
			requireRefused(t, jsonConfig(t, "", "{"+test.options+"}"), "http.handlers.edge_limit", test.want)
		})
	}
}

// Mistakes in limits, ceilings and in_flights are the same ones for the app and
// a handler.
var mistakenBudgets = []struct {
	name    string
	budgets string
	want    string // in the error, with the name
}{
	{"limit without a name", `"limits": [{"rate": "10/m"}]`, `name "": only a-z, 0-9 and _ are possible`},
	{"limit with a bad name", `"limits": [{"name": "my-api", "rate": "10/m"}]`, `limit my-api: name "my-api": only a-z, 0-9 and _ are possible`},
	{"limit with a name of two lines", `"limits": [{"name": "api\n", "rate": "10/m"}]`, `only a-z, 0-9 and _ are possible`},
	{"limit with a name that a snapshot cannot hold", `"limits": [{"name": "` + strings.Repeat("a", 1<<16) + `", "rate": "10/m"}]`, "at most 100 are possible"},
	{"limit called unresolved", `"limits": [{"name": "unresolved", "rate": "10/m"}]`, `the name "unresolved" is taken`},
	{"limit without a rate", `"limits": [{"name": "api"}]`, `limit api: rate "" is not <count>/<window>: write for example 10/m`},
	{"limit of none", `"limits": [{"name": "api", "rate": "0/m"}]`, `limit api: rate "0/m"`},
	{"limit in no time", `"limits": [{"name": "api", "rate": "10/0s"}]`, `limit api: rate "10/0s"`},
	{"limit in 300 years", `"limits": [{"name": "api", "rate": "10/109500d"}]`, `limit api: rate "10/109500d"`},
	{"limit of 1e30", `"limits": [{"name": "api", "rate": "1e30/s"}]`, `limit api: rate "1e30/s"`},
	{"limit of no number", `"limits": [{"name": "api", "rate": "NaN/s"}]`, `limit api: rate "NaN/s"`},
	{"burst negative", `"limits": [{"name": "api", "rate": "10/m", "burst": -1}]`, "limit api: burst must be at least 1"},
	{"burst that overflows", `"limits": [{"name": "api", "rate": "10/m", "burst": 1000000000000000}]`, "limit api: burst 1000000000000000 is too large"},
	{"burst beyond an int64", `"limits": [{"name": "api", "rate": "10/m", "burst": 9223372036854775808}]`, "burst"},
	{"key with an empty part", `"limits": [{"name": "api", "rate": "10/m", "key": ["client", ""]}]`, "limit api: a part of a key is empty"},
	{"key with the client's address", `"limits": [{"name": "api", "rate": "10/m", "key": ["{http.vars.client_ip}"]}]`, "limit api: key {http.vars.client_ip}: write key client"},
	{"key with a shorthand", `"limits": [{"name": "api", "rate": "10/m", "key": ["{host}"]}]`, "limit api: key \"{host}\": {host} is no placeholder that Caddy knows"},
	{"key that is not closed", `"limits": [{"name": "api", "rate": "10/m", "key": ["{http.request.host"]}]`, "limit api: key \"{http.request.host\": a placeholder is not closed"},
	{"key_writer unknown", `"limits": [{"name": "api", "rate": "10/m", "key_writer": "proxy"}]`, `limit api: key_writer "proxy": must be caller or server`},
	{"ipv4_prefix negative", `"limits": [{"name": "api", "rate": "10/m", "ipv4_prefix": -1}]`, "limit api: ipv4_prefix must be from 1 to 32"},
	{"ipv4_prefix too long", `"limits": [{"name": "api", "rate": "10/m", "ipv4_prefix": 33}]`, "limit api: ipv4_prefix must be from 1 to 32"},
	{"ipv6_prefix too long", `"limits": [{"name": "api", "rate": "10/m", "ipv6_prefix": 129}]`, "limit api: ipv6_prefix must be from 1 to 128"},
	{"match of an unknown matcher", `"limits": [{"name": "api", "rate": "10/m", "match": [{"paths": ["/api/*"]}]}]`, "limit api: loading matchers"},
	{"exempt of an unknown module", `"limits": [{"name": "api", "rate": "10/m", "exempt": [{"source": "cloud"}]}]`, "limit api: exempt"},
	{"exempt no range", `"limits": [{"name": "api", "rate": "10/m", "exempt": [{"source": "static", "ranges": ["10.0.0.0/33"]}]}]`, "limit api: exempt"},
	{"on_status without codes", `"limits": [{"name": "api", "rate": "10/m", "on_status": {}}]`, "limit api: on_status: name the status codes"},
	{"on_status late without codes", `"limits": [{"name": "api", "rate": "10/m", "on_status": {"late": true}}]`, "limit api: on_status: name the status codes"},
	{"on_status unknown", `"limits": [{"name": "api", "rate": "10/m", "on_status": {"codes": ["9xx"]}}]`, `limit api: on_status "9xx": must be a status from 200 to 599`},
	{"ban negative", `"limits": [{"name": "api", "rate": "10/m", "ban": -1}]`, "limit api: ban must be a duration"},
	{"ban too long", `"limits": [{"name": "api", "rate": "10/m", "ban": "3651d"}]`, "limit api: ban must be a duration of at most 3650d"},
	{"extend without a ban", `"limits": [{"name": "api", "rate": "10/m", "extend": true}]`, "limit api: extend says how a ban is counted: write ban <duration> extend"},
	{"cost of nothing", `"limits": [{"name": "api", "rate": "10/m", "cost": "0"}]`, `limit api: cost "0": must be a positive number or a placeholder`},
	{"cost no number", `"limits": [{"name": "api", "rate": "10/m", "cost": "NaN"}]`, `limit api: cost "NaN": must be a positive number or a placeholder`},
	{"cost above the burst", `"limits": [{"name": "api", "rate": "10/m", "cost": "11"}]`, "limit api: cost 11 is more than the burst 10"},
	{"limit with a status that denies nothing", `"limits": [{"name": "api", "rate": "10/m", "status": 200}]`, "limit api: status 200 denies nothing: must be from 400 to 599"},
	{"limit with a status above 599", `"limits": [{"name": "api", "rate": "10/m", "status": 600}]`, "limit api: status 600 denies nothing: must be from 400 to 599"},
	{"limit with a field that is not known", `"limits": [{"name": "api", "rate": "10/m", "bursts": 5}]`, "bursts"},
	{"limit that is null", `"limits": [{"name": "api", "rate": "10/m"}, null]`, "limits: an entry is null"},
	{"limits unlike of one name", `"limits": [{"name": "api", "rate": "10/m"}, {"name": "api", "rate": "20/m"}]`, "the name api is defined twice"},
	{"limit and ceiling of one name", `"limits": [{"name": "api", "rate": "10/m"}], "ceilings": [{"name": "api", "rate": "10/m"}]`, "the name api is defined twice"},
	{"limit and in_flight of one name", `"limits": [{"name": "api", "rate": "10/m"}], "in_flight": [{"name": "api", "max": 10}]`, "the name api is defined twice"},

	{"ceiling without a name", `"ceilings": [{"rate": "10/m"}]`, `name "": only a-z, 0-9 and _ are possible`},
	{"ceiling called unresolved", `"ceilings": [{"name": "unresolved", "rate": "10/m"}]`, `the name "unresolved" is taken`},
	{"ceiling without a rate", `"ceilings": [{"name": "all"}]`, `ceiling all: rate "" is not <count>/<window>`},
	{"ceiling in no time", `"ceilings": [{"name": "all", "rate": "10/0s"}]`, `ceiling all: rate "10/0s"`},
	{"ceiling with a status that denies nothing", `"ceilings": [{"name": "all", "rate": "10/m", "status": 200}]`, "ceiling all: status 200 denies nothing"},
	{"ceiling with a key", `"ceilings": [{"name": "all", "rate": "10/m", "key": ["client"]}]`, "key"},
	{"ceiling that is null", `"ceilings": [null]`, "ceilings: an entry is null"},
	{"ceilings unlike of one name", `"ceilings": [{"name": "all", "rate": "10/m"}, {"name": "all", "rate": "20/m"}]`, "the name all is defined twice"},

	{"in_flight that is null", `"in_flight": [null]`, "in_flight: an entry is null"},
	{"in_flight without a name", `"in_flight": [{"max": 10}]`, `name "": only a-z, 0-9 and _ are possible`},
	{"in_flight of none", `"in_flight": [{"name": "uploads"}]`, "in_flight uploads: the number of requests at the same time must be at least 1"},
	{"in_flight negative", `"in_flight": [{"name": "uploads", "max": -1}]`, "in_flight uploads: the number of requests at the same time must be at least 1"},
	{"in_flight with the client's address", `"in_flight": [{"name": "uploads", "max": 10, "key": ["{http.vars.client_ip}"]}]`, "in_flight uploads: key {http.vars.client_ip}: write key client"},
	{"in_flight with a status that denies nothing", `"in_flight": [{"name": "uploads", "max": 10, "status": 200}]`, "in_flight uploads: status 200 denies nothing"},
}

func TestMistakenBudgetsInJSON(t *testing.T) {
	for _, test := range mistakenBudgets {
		t.Run("app/"+test.name, func(t *testing.T) {
			requireRefused(t, jsonConfig(t, "{"+test.budgets+"}"), "edge_limit", test.want)
		})
		t.Run("handler/"+test.name, func(t *testing.T) {
			requireRefused(t, jsonConfig(t, "", "{"+test.budgets+"}"), "http.handlers.edge_limit", test.want)
		})
	}
}

func TestMistakesInJSON(t *testing.T) {
	const (
		api    = `{"limits": [{"name": "api", "rate": "10/m"}]}`
		byKey  = `{"name": "key", "rate": "10/m", "key": ["{http.request.header.X-Api-Key}"]}`
		escape = "is written by the caller"
	)
	for _, test := range []struct {
		name     string
		app      string
		handlers []string
		want     string
	}{
		{"ipv4_prefix negative", `{"ipv4_prefix": -1}`, nil, "ipv4_prefix must be from 1 to 32"},
		{"ipv4_prefix too long", `{"ipv4_prefix": 33}`, nil, "ipv4_prefix must be from 1 to 32"},
		{"ipv6_prefix negative", `{"ipv6_prefix": -1}`, nil, "ipv6_prefix must be from 1 to 128"},
		{"ipv6_prefix too long", `{"ipv6_prefix": 129}`, nil, "ipv6_prefix must be from 1 to 128"},
		{"ipv4_prefix no number", `{"ipv4_prefix": "24"}`, nil, "ipv4_prefix"},
		{"max_keys negative", `{"max_keys": -1}`, nil, "max_keys -1: must be from 1 to 268435456"},
		{"max_keys too large", `{"max_keys": 268435457}`, nil, "max_keys 268435457: must be from 1 to 268435456"},
		{"pepper short", `{"pepper": "fifteen bytes.."}`, nil, "pepper: a secret of 15 bytes can be guessed: give at least 16"},
		{"pepper of a variable that is not set", `{"pepper": "{env.EDGE_LIMIT_TEST_IS_NOT_SET}"}`, nil, "pepper: a secret could not be read: evaluated placeholder {env.EDGE_LIMIT_TEST_IS_NOT_SET} is empty"},
		{"pepper of a placeholder that is none", `{"pepper": "{environment.PEPPER}"}`, nil, "pepper: a secret could not be read"},
		{"a field that is not known", `{"limit": []}`, nil, "limit"},

		{"use of an unknown name", api, []string{`{"use": ["login"]}`}, "login is not defined: define a limit, ceiling or in_flight of that name in the global edge_limit block"},
		{"use of an unknown name without an app", "", []string{`{"use": ["login"]}`}, "login is not defined"},
		{"use of another handler's name", "", []string{api, `{"use": ["api"]}`}, "api is not defined"},
		{"use of one name twice", api, []string{`{"use": ["api", "api"]}`}, "twice"},
		{"use and definition of one name", api, []string{`{"use": ["api"], "limits": [{"name": "api", "rate": "10/m"}]}`}, "twice"},
		{"limits alike of one name in one handler", "", []string{`{"limits": [{"name": "api", "rate": "10/m"}, {"name": "api", "rate": "10/m"}]}`}, "twice"},
		{"match of an unknown matcher", "", []string{`{"match": [{"paths": ["/api/*"]}]}`}, "http.matchers.paths"},
		{"a field of the handler that is not known", "", []string{`{"limit": []}`}, "limit"},
		{"a field of the probe that is not known", "", []string{`{"handler": "edge_limit_probe", "details": true}`}, "details"},

		{"handlers unlike of one name", "", []string{api, `{"limits": [{"name": "api", "rate": "20/m"}]}`}, "the name api is defined twice, and not alike"},
		{"handlers unlike in the burst alone", "", []string{api, `{"limits": [{"name": "api", "rate": "10/m", "burst": 5}]}`}, "the name api is defined twice, and not alike"},
		{"handlers unlike in the match alone", "", []string{api, `{"limits": [{"name": "api", "rate": "10/m", "match": [{"path": ["/api/*"]}]}]}`}, "the name api is defined twice, and not alike"},
		{"a handler unlike the app", api, []string{`{"limits": [{"name": "api", "rate": "20/m"}]}`}, "the name api is defined twice, and not alike"},
		{"a handler's ceiling under the name of the app's limit", api, []string{`{"ceilings": [{"name": "api", "rate": "10/m"}]}`}, "use it by name, or give one of them another name"},

		{"a key that the caller writes", "", []string{`{"limits": [` + byKey + `]}`}, escape},
		{"a key that the caller writes, from the app", `{"limits": [` + byKey + `]}`, []string{`{"use": ["key"]}`}, escape},
		{"a key that the caller writes, bounded in another handler", `{"ceilings": [{"name": "all", "rate": "100/s"}]}`, []string{`{"use": ["all"]}`, `{"limits": [` + byKey + `]}`}, escape},
		{"a key that the caller writes, bounded on trial", "", []string{`{"limits": [` + byKey + `], "ceilings": [{"name": "all", "rate": "100/s", "observe": true}]}`}, escape},
		{"a key that the caller writes, bounded in part", "", []string{`{"limits": [` + byKey + `], "ceilings": [{"name": "all", "rate": "100/s", "match": [{"path": ["/api/*"]}]}]}`}, escape},
		{"a key that the caller writes, bounded for some", "", []string{`{"limits": [` + byKey + `, {"name": "client", "rate": "100/m", "exempt": [{"source": "static", "ranges": ["10.0.0.0/8"]}]}]}`}, escape},
		{"a cost that the caller writes", "", []string{`{"limits": [{"name": "api", "rate": "10/m", "cost": "{http.request.header.X-Cost}"}]}`}, escape},
		{"an in_flight keyed by what the caller writes", "", []string{`{"in_flight": [{"name": "uploads", "max": 10, "key": ["{http.request.header.X-User}"]}]}`}, escape},
	} {
		t.Run(test.name, func(t *testing.T) {
			requireRefused(t, jsonConfig(t, test.app, test.handlers...), "edge_limit", test.want)
		})
	}
}

func TestJSONThatLoads(t *testing.T) {
	const api = `{"limits": [{"name": "api", "rate": "10/m"}]}`
	for _, test := range []struct {
		name     string
		app      string
		handlers []string
	}{
		{"an empty app", `{}`, nil},
		{"an empty handler", "", []string{`{}`}},
		{"an empty client block", `{"client": {}}`, []string{`{"client": {}}`}},
		{"numbers of 0 are the defaults", `{"ipv4_prefix": 0, "ipv6_prefix": 0, "max_keys": 0}`, []string{`{"limits": [{"name": "api", "rate": "10/m", "burst": 0, "status": 0, "ipv4_prefix": 0, "ban": 0}]}`}},
		{"handlers alike of one name", "", []string{api, api}},
		{"handlers alike, one with the defaults written out", "", []string{api, `{"limits": [{"name": "api", "rate": "10/60s", "burst": 10, "key": ["client"], "status": 429}]}`}},
		{"a handler like the app", api, []string{api}},
		{"a handler that uses what the app defines", api, []string{`{"use": ["api"]}`, `{"use": ["api"]}`}},
		{"a key that the caller writes, bounded", "", []string{`{"limits": [{"name": "key", "rate": "10/m", "key": ["{http.request.header.X-Api-Key}"]}], "ceilings": [{"name": "all", "rate": "100/s"}]}`}},
		{"a key that the caller writes, on purpose", "", []string{`{"limits": [{"name": "key", "rate": "10/m", "key_writer": "caller", "key": ["{http.request.header.X-Api-Key}"]}]}`}},
		{"a key that the caller writes, not used", `{"limits": [{"name": "key", "rate": "10/m", "key": ["{http.request.header.X-Api-Key}"]}]}`, nil},
		{"ban as a text", "", []string{`{"limits": [{"name": "api", "rate": "10/m", "ban": "10m", "extend": true}]}`}},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := heldStates()
			if err := validateJSON(t, jsonConfig(t, test.app, test.handlers...)); err != nil {
				t.Error(err)
			}
			requireHeld(t, before)
		})
	}
}

// requireRefused wants an error that names the module and says want, and nothing
// left over.
func requireRefused(t *testing.T, config []byte, module, want string) {
	t.Helper()
	before := heldStates()
	err := validateJSON(t, config)
	if err == nil {
		t.Fatalf("the configuration loads, want an error with %s", want)
	}
	for _, part := range []string{module, want} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the error is\n%v\nwant in it\n%s", err, part)
		}
	}
	requireHeld(t, before)
}

// TestErrorsKeepSecrets: an error about a secret does not show it.
func TestErrorsKeepSecrets(t *testing.T) {
	t.Setenv("EDGE_LIMIT_TEST_SHORT", "hush-hush")
	t.Setenv("EDGE_LIMIT_TEST_BLANK", "   ")
	for _, test := range []struct{ name, app, secret string }{
		{"a short pepper", `{"pepper": "hush-hush"}`, "hush"},
		{"a short pepper in a variable", `{"pepper": "{env.EDGE_LIMIT_TEST_SHORT}"}`, "hush"},
		{"a blank variable beside a secret", `{"client": {"proof": {"header": "X-Proof", "secrets": ["hush-hush", "{env.EDGE_LIMIT_TEST_BLANK}"]}}}`, "hush"},
		{"a variable that is not set beside a secret", `{"client": {"proof": {"header": "X-Proof", "secrets": ["hush-hush{env.EDGE_LIMIT_TEST_IS_NOT_SET}"]}}}`, "hush"},
		{"a secret with braces", `{"client": {"proof": {"header": "X-Proof", "secrets": ["a{hush-hush}z"]}}}`, "hush"},
		{"a pepper with braces", `{"pepper": "a secret with {hush-hush} in it"}`, "hush"},
		{"one header for both", `{"client": {"proof": {"header": "X-Client-IP", "secrets": ["hush-hush"]}}}`, "hush"},
		{"connection and proof", `{"client": {"connection": true, "proof": {"header": "X-Proof", "secrets": ["hush-hush"]}}}`, "hush"},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := validateJSON(t, jsonConfig(t, test.app))
			if err == nil {
				t.Fatal("the configuration loads, want an error")
			}
			if strings.Contains(err.Error(), test.secret) {
				t.Errorf("the error shows the secret: %v", err)
			}
		})
	}
}

// heldStates are the references to each state that outlives a configuration.
func heldStates() map[string]int {
	held := make(map[string]int)
	states.Range(func(key, _ any) bool {
		references, _ := states.References(key)
		held[fmt.Sprint(key)] = references
		return true
	})
	return held
}

func requireHeld(t *testing.T, want map[string]int) {
	t.Helper()
	if got := heldStates(); !maps.Equal(got, want) {
		t.Errorf("states held: %v, want %v", got, want)
	}
}

// TestValidatingLeavesNothing: a configuration that is only validated, or that
// fails wherever it may, releases all it took.
func TestValidatingLeavesNothing(t *testing.T) {
	const (
		app     = `{"limits": [{"name": "held_a", "rate": "10/m"}], "ceilings": [{"name": "held_b", "rate": "100/s"}], "in_flight": [{"name": "held_c", "max": 10}]}`
		handler = `{"use": ["held_a", "held_b", "held_c"], "limits": [{"name": "held_d", "rate": "10/m"}], "ceilings": [{"name": "held_e", "rate": "100/s"}], "in_flight": [{"name": "held_f", "max": 10}]}`
	)
	for _, test := range []struct {
		name  string
		app   string
		route []string
		fails bool
	}{
		{"nothing fails", app, []string{handler, handler, `{"limits": [{"name": "held_d", "rate": "10/m"}]}`}, false},
		{"the second limit of the app", `{"limits": [{"name": "held_a", "rate": "10/m"}, {"name": "held_b", "rate": "0/m"}]}`, nil, true},
		{"the ceiling of the app", `{"limits": [{"name": "held_a", "rate": "10/m"}], "ceilings": [{"name": "held_b", "rate": "0/m"}]}`, nil, true},
		{"a conflict in the app", `{"limits": [{"name": "held_a", "rate": "10/m"}, {"name": "held_a", "rate": "20/m"}]}`, nil, true},
		{"matchers of a limit of the app", `{"limits": [{"name": "held_a", "rate": "10/m"}, {"name": "held_b", "rate": "10/m", "match": [{"paths": []}]}]}`, nil, true},
		{"an unknown name", app, []string{handler, `{"use": ["held_z"]}`}, true},
		{"a limit of the second handler", app, []string{handler, `{"limits": [{"name": "held_d", "rate": "10/m"}, {"name": "held_z", "rate": "0/m"}]}`}, true},
		{"a conflict of two handlers", app, []string{handler, `{"limits": [{"name": "held_d", "rate": "20/m"}]}`}, true},
		{"provenance", app, []string{handler, `{"limits": [{"name": "held_z", "rate": "10/m", "key": ["{http.request.host}"]}]}`}, true},
		{"the handler's matcher", app, []string{`{"match": [{"paths": []}], "limits": [{"name": "held_d", "rate": "10/m"}]}`}, true},
		{"another handler", app, []string{handler, `{"handler": "none_such"}`}, true},
		{"a field that is not known", app, []string{handler, `{"limits": [{"name": "held_d", "rate": "10/m"}], "limit": 1}`}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := heldStates()
			config := jsonConfig(t, test.app, test.route...)
			err := validateJSON(t, config)
			if (err != nil) != test.fails {
				t.Errorf("validating: %v", err)
			}
			requireHeld(t, before)
			if files := storedFiles(t, config); len(files) > 0 {
				t.Errorf("validating wrote %v", slices.Collect(maps.Keys(files)))
			}
		})
	}
}

// TestFailedReloadLeavesTheRunningConfig: whatever becomes of another
// configuration, the states of the one that runs are the same ones, as often
// referred to, and its files are as they were.
func TestFailedReloadLeavesTheRunningConfig(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	t.Setenv("XDG_DATA_HOME", t.TempDir())

	const app = `{"limits": [{"name": "run_a", "rate": "10/m"}]}`
	const handler = `{"use": ["run_a"], "limits": [{"name": "run_b", "rate": "10/m"}], "ceilings": [{"name": "run_c", "rate": "100/s"}], "in_flight": [{"name": "run_d", "max": 10}]}`
	idle := heldStates()
	running := jsonConfig(t, app, handler, handler)
	if err := caddy.Load(running, true); err != nil {
		t.Fatal(err)
	}
	stopped := false
	defer func() {
		if !stopped {
			_ = caddy.Stop()
		}
	}()

	held := heldStates()
	for name, references := range map[string]int{
		"{limit run_a}": 1, "{limit run_b}": 2, "{ceiling run_c}": 2, "{in_flight run_d}": 2,
	} {
		if held[name] != references {
			t.Errorf("%s has %d references, want %d", name, held[name], references)
		}
	}
	same := stateIdentities()
	storage := storedFiles(t, running)

	inStorageOf := func(config []byte, listen string) []byte {
		var fields, original map[string]any
		if json.Unmarshal(config, &fields) != nil || json.Unmarshal(running, &original) != nil {
			t.Fatal("a configuration is no JSON")
		}
		fields["storage"] = original["storage"]
		if listen != "" {
			servers := fields["apps"].(map[string]any)["http"].(map[string]any)["servers"].(map[string]any)
			servers["site"].(map[string]any)["listen"] = []string{listen}
		}
		return caddyconfig.JSON(fields, nil)
	}
	for _, test := range []struct {
		name   string
		config []byte
		load   bool
		fails  bool
	}{
		{"validating the same", inStorageOf(running, ""), false, false},
		{"validating other numbers", inStorageOf(jsonConfig(t, `{"limits": [{"name": "run_a", "rate": "99/h"}]}`), ""), false, false},
		{"validating a mistake", inStorageOf(jsonConfig(t, app, handler, `{"use": ["none_such"]}`), ""), false, true},
		{"loading a mistake", inStorageOf(jsonConfig(t, app, handler, `{"use": ["none_such"]}`), ""), true, true},
		{"loading other numbers and a mistake", inStorageOf(jsonConfig(t, `{"max_keys": 5, "limits": [{"name": "run_a", "rate": "99/h"}]}`, `{"use": ["run_a", "none_such"]}`), ""), true, true},
		{"loading what cannot listen", inStorageOf(jsonConfig(t, app, handler), listener.Addr().String()), true, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			var err error
			if test.load {
				err = caddy.Load(test.config, true)
			} else {
				err = validateJSON(t, test.config)
			}
			if (err != nil) != test.fails {
				t.Errorf("error: %v", err)
			}
			requireHeld(t, held)
			if got := stateIdentities(); !maps.Equal(got, same) {
				t.Errorf("states: %v, want the same as before: %v", got, same)
			}
			if got := storedFiles(t, running); !maps.Equal(got, storage) {
				t.Errorf("storage: %v, want as before: %v", slices.Collect(maps.Keys(got)), slices.Collect(maps.Keys(storage)))
			}
		})
	}

	if err := caddy.Load(inStorageOf(running, ""), true); err != nil {
		t.Fatal(err)
	}
	requireHeld(t, held)
	if err := caddy.Stop(); err != nil {
		t.Fatal(err)
	}
	stopped = true
	requireHeld(t, idle)
}

// stateIdentities tells states of one name apart.
func stateIdentities() map[string]string {
	identities := make(map[string]string)
	states.Range(func(key, state any) bool {
		identities[fmt.Sprint(key)] = fmt.Sprintf("%p", state)
		return true
	})
	return identities
}

// storedFiles are the files that this module keeps in the storage of a
// configuration, with their content.
func storedFiles(t *testing.T, config []byte) map[string]string {
	t.Helper()
	var fields struct {
		Storage struct{ Root string }
	}
	if err := json.Unmarshal(config, &fields); err != nil {
		t.Fatal(err)
	}
	files := make(map[string]string)
	err := filepath.WalkDir(filepath.Join(fields.Storage.Root, "edge_limit"), func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := os.ReadFile(path)
		files[path] = string(content)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// documented are the types whose fields are the module's documentation, and
// those of their fields that must be given.
var documented = map[string][]string{
	"App":      nil,
	"Options":  nil,
	"Handler":  nil,
	"Limit":    {"Name", "Rate"},
	"OnStatus": {"Codes"},
	"Ceiling":  {"Name", "Rate"},
	"InFlight": {"Name", "Max"},
	"Client":   nil,
	"Proof":    {"Header", "Secrets"},
	"Probe":    nil,

	"SharedOptions": nil,
}

// TestFieldsAreDocumented: Caddy makes the documentation of modules from the
// comments of their fields. Each says what it means, and its default if it can
// be left out.
func TestFieldsAreDocumented(t *testing.T) {
	found := make(map[string]bool)
	for name, declared := range structsOfPackage(t) {
		required, ok := documented[name]
		if !ok {
			continue
		}
		found[name] = true
		for _, field := range declared.Fields.List {
			if len(field.Names) == 0 || !field.Names[0].IsExported() {
				continue
			}
			fieldName := field.Names[0].Name
			tag := jsonTagOf(t, field)
			if tag == "" {
				t.Errorf("%s.%s has no name in JSON", name, fieldName)
			}
			if !strings.HasSuffix(tag, ",omitempty") {
				t.Errorf("%s.%s: %q is not left out of JSON where it is not set", name, fieldName, tag)
			}
			comment := strings.TrimSpace(field.Doc.Text())
			optional := !slices.Contains(required, fieldName)
			switch {
			case comment == "":
				t.Errorf("%s.%s has no comment", name, fieldName)
			case optional && !strings.Contains(comment, "Default"):
				t.Errorf("%s.%s can be left out, and its comment does not say \"Default: ...\":\n%s", name, fieldName, comment)
			case !optional && strings.Contains(comment, "Default"):
				t.Errorf("%s.%s must be given, and its comment speaks of a default:\n%s", name, fieldName, comment)
			case !strings.HasSuffix(comment, "."):
				t.Errorf("%s.%s: the comment does not end as a sentence:\n%s", name, fieldName, comment)
			}
		}
	}
	for name := range documented {
		if !found[name] {
			t.Errorf("there is no struct %s", name)
		}
	}
}

// TestEveryConfigTypeIsDocumented: a struct with names in JSON that is not in
// the table above would escape the test.
func TestEveryConfigTypeIsDocumented(t *testing.T) {
	for name, declared := range structsOfPackage(t) {
		if _, ok := documented[name]; ok || !ast.IsExported(name) {
			continue
		}
		for _, field := range declared.Fields.List {
			if jsonTagOf(t, field) != "" {
				t.Errorf("%s has names in JSON: add it to the table of documented types", name)
				break
			}
		}
	}
}

func jsonTagOf(t *testing.T, field *ast.Field) string {
	t.Helper()
	if field.Tag == nil {
		return ""
	}
	text, err := strconv.Unquote(field.Tag.Value)
	if err != nil {
		t.Fatal(err)
	}
	return reflect.StructTag(text).Get("json")
}

// structsOfPackage parses this package without its tests.
func structsOfPackage(t *testing.T) map[string]*ast.StructType {
	t.Helper()
	paths, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	structs := make(map[string]*ast.StructType)
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(node ast.Node) bool {
			if spec, ok := node.(*ast.TypeSpec); ok {
				if declared, ok := spec.Type.(*ast.StructType); ok {
					structs[spec.Name.Name] = declared
				}
			}
			return true
		})
	}
	return structs
}
