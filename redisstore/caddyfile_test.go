package redisstore

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
)

const pepper = "pepper 0123456789abcdef"

// adapt makes JSON of a store's block.
func adapt(t *testing.T, block string) (string, error) {
	t.Helper()
	text := "{\n\tedge_limit {\n\t\t" + pepper + "\n\t\tstore redis {\n" + block + "\n\t\t}\n\t}\n}\n:80 {\n\tedge_limit {\n\t\tlimit a 1/m\n\t}\n}\n"
	adapted, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), map[string]any{"filename": "Caddyfile"})
	return string(adapted), err
}

// The words of the block and those of JSON are the same.
func TestCaddyfile(t *testing.T) {
	for _, row := range []struct{ reason, block, want string }{
		{"an address is enough", "address 127.0.0.1:6379", `{"address":["127.0.0.1:6379"],"module":"redis"}`},
		{"a host name, and IPv6", "address redis.internal:6379 [::1]:6380", `{"address":["redis.internal:6379","[::1]:6380"],"module":"redis"}`},
		{"all options", `address 127.0.0.1:6379
			username edge
			password {env.REDIS_PASSWORD}
			tls /etc/redis/ca.pem
			database 3
			prefix edge:one
			timeout 25ms
			on_failure local_full
			fleet 4`, `{"address":["127.0.0.1:6379"],"database":3,"fleet":4,"module":"redis","on_failure":"local_full",` +
			`"password":"{env.REDIS_PASSWORD}","prefix":"edge:one","timeout":25000000,"tls":{"ca":"/etc/redis/ca.pem"},"username":"edge"}`},
		{"Sentinels may have a database", "address 127.0.0.1:26379 127.0.0.2:26379\nmaster_name mymaster\ndatabase 1",
			`{"address":["127.0.0.1:26379","127.0.0.2:26379"],"database":1,"master_name":"mymaster","module":"redis"}`},
		{"the system's authorities", "address 127.0.0.1:6379\ntls", `{"address":["127.0.0.1:6379"],"module":"redis","tls":{}}`},
	} {
		t.Run(row.reason, func(t *testing.T) {
			adapted, err := adapt(t, row.block)
			if err != nil {
				t.Fatal(err)
			}
			var config struct {
				Apps struct {
					EdgeLimit struct {
						Store json.RawMessage `json:"store"`
					} `json:"edge_limit"`
				} `json:"apps"`
			}
			if err := json.Unmarshal([]byte(adapted), &config); err != nil {
				t.Fatal(err)
			}
			if got := string(config.Apps.EdgeLimit.Store); got != row.want {
				t.Errorf("got  %s\nwant %s", got, row.want)
			}
		})
	}
}

// Each error names the line and what to write.
func TestCaddyfileErrors(t *testing.T) {
	for _, row := range []struct{ reason, block, want string }{
		{"no address", "timeout 50ms", "an address is missing: write address <host>:<port>, at Caddyfile:4"},
		{"an empty block", "", "an address is missing"},
		{"address alone", "address", "address: an argument is missing: write <host>:<port>, at Caddyfile:5"},
		{"no port", "address redis", `address "redis": write <host>:<port>`},
		{"no host", "address :6379", `address ":6379": write <host>:<port>`},
		{"a port that is none", "address redis:70000", `address "redis:70000"`},
		{"a placeholder, which nothing expands", "address {env.REDIS}:6379", `address "{env.REDIS}:6379": write {$NAME}`},
		{"a URL", "address redis://localhost:6379", `address "redis://localhost:6379": write <host>:<port>`},
		{"a database of a cluster", "address a:1 b:1\ndatabase 1", "several addresses without a master_name are a cluster, which has only database 0"},
		{"a database that is none", "address a:1\ndatabase x", `database "x": must be a whole number of 0 or more, at Caddyfile:6`},
		{"a negative database", "address a:1\ndatabase -1", `database "-1"`},
		{"a user without a password", "address a:1\nusername edge", "username: a password is missing"},
		{"an empty password", "address a:1\npassword \"\"", "password is empty: write {env.NAME} or {file.PATH}"},
		{"braces in the prefix: a cluster would spread by them", "address a:1\nprefix {x}", `prefix "{x}"`},
		{"a blank in the prefix", "address a:1\nprefix \"a b\"", `prefix "a b"`},
		{"twice", "address a:1\naddress b:1", "address is set twice: the second would replace the first, at Caddyfile:6"},
		{"a generic option twice", "address a:1\nfleet 2\nfleet 3", "fleet is set twice"},
		{"no timeout", "address a:1\ntimeout 0", `timeout "0": must be more than nothing, at Caddyfile:6`},
		{"a timeout that is none", "address a:1\ntimeout soon", `timeout "soon" is no duration`},
		{"a negative timeout", "address a:1\ntimeout -5ms", `timeout "-5ms": must be more than nothing`},
		{"longer than anybody waits", "address a:1\ntimeout 1m", "timeout 1m0s: must be from 1ms to 10s, at Caddyfile:6"},
		{"shorter than a journey", "address a:1\ntimeout 1us", "timeout 1µs: must be from 1ms to 10s"},
		{"another failure", "address a:1\non_failure ignore", `on_failure "ignore": must be local, local_full, open or closed`},
		{"no fleet", "address a:1\nfleet 0", `fleet "0": must be a whole number from 1 to 10000`},
		{"two arguments", "address a:1\nmaster_name a b", `unexpected argument "b"`},
		{"two files", "address a:1\ntls a b", `unexpected argument "b"`},
		{"a misspelt option", "address a:1\npasword x", `unrecognized subdirective "pasword"; possible here: address, master_name`},
	} {
		t.Run(row.reason, func(t *testing.T) {
			_, err := adapt(t, row.block)
			if err == nil {
				t.Fatalf("no error, want %q", row.want)
			}
			if !strings.Contains(err.Error(), row.want) || !strings.Contains(err.Error(), "Caddyfile:") {
				t.Errorf("got %q, want %q and the line", err, row.want)
			}
		})
	}
}

// What can be known at load is an error there; nothing is connected for it.
func TestLoad(t *testing.T) {
	t.Setenv("EDGE_LIMIT_TEST_EMPTY", "")
	for _, row := range []struct{ reason, store, want string }{
		{"all is well, and nothing listens there", `{"module": "redis", "address": ["127.0.0.1:1"]}`, ""},
		{"a variable that is not set", `{"module": "redis", "address": ["127.0.0.1:1"], "password": "{env.EDGE_LIMIT_TEST_EMPTY}"}`, "password: a secret"},
		{"a file that is not there", `{"module": "redis", "address": ["127.0.0.1:1"], "tls": {"ca": "testdata/missing.pem"}}`, "tls: open testdata/missing.pem"},
		{"a file without a certificate", `{"module": "redis", "address": ["127.0.0.1:1"], "tls": {"ca": "store.go"}}`, "holds no certificate"},
		{"no address", `{"module": "redis"}`, "an address is missing"},
		{"a negative timeout", `{"module": "redis", "address": ["127.0.0.1:1"], "timeout": -5}`, "timeout"},
		{"a misspelt field", `{"module": "redis", "adress": ["127.0.0.1:1"]}`, "adress"},
	} {
		t.Run(row.reason, func(t *testing.T) {
			config := new(caddy.Config)
			text := `{"admin": {"disabled": true}, "apps": {"edge_limit": {"pepper": "0123456789abcdef", "persist": false, "store": ` + row.store + `}}}`
			if err := json.Unmarshal([]byte(text), config); err != nil {
				t.Fatal(err)
			}
			err := caddy.Validate(config)
			if row.want == "" && err != nil || row.want != "" && (err == nil || !strings.Contains(err.Error(), row.want)) {
				t.Errorf("got %v, want %q", err, row.want)
			}
		})
	}
}
