package e2e

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// probed is what the probe answers.
type probed struct {
	Resolved         *string
	Source           string
	Reason           string
	TrustedProxyHops int
	SpoofIgnored     *bool
	Healthy          bool
}

// client is the resolved client, or unresolved.
func (p probed) client() string {
	if p.Resolved == nil {
		return "unresolved"
	}
	return *p.Resolved
}

func probe(t *testing.T, via http.RoundTripper, url string, headers ...string) (p probed) {
	t.Helper()
	a := get(t, via, url, headers...)
	if err := json.Unmarshal(a.body, &p); err != nil {
		t.Fatalf("status %d, no probe's answer: %s", a.status, a.body)
	}
	return p
}

// A frontend between two Caddys takes the last entry of the chain, which the
// Caddy before it wrote, and sends exactly one value on.
func TestFrontendThatRewrites(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	app, outer, inner := startUpstream(t), freeAddr(t), freeAddr(t)

	relays := false // a frontend that relays the chain is a mistake
	target, err := url.Parse("http://" + inner)
	if err != nil {
		t.Fatal(err)
	}
	frontend := httptest.NewServer(&httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			chain := strings.Join(r.In.Header["X-Forwarded-For"], ",")
			if relays {
				r.Out.Header["X-Forwarded-For"] = []string{forgedNet + "9.9, " + chain}
				return
			}
			entries := strings.Split(chain, ",")
			r.Out.Header.Set("X-Forwarded-For", strings.TrimSpace(entries[len(entries)-1]))
		},
		Transport: clientFrom(t, "127.0.0.4"),
	})
	t.Cleanup(frontend.Close)

	startCaddy(t, "", site(outer, "reverse_proxy "+frontend.Listener.Addr().String())+site(inner, `
		edge_limit {
			client {
				trusted_proxies static 127.0.0.4
				single_value
			}
			`+fivePerHour+`
		}
		edge_limit_probe /client-ip
		reverse_proxy `+app.addr))

	for _, visitor := range []string{"127.0.0.5", "127.0.0.6"} {
		client := clientFrom(t, visitor)
		for n := range 5 {
			get(t, client, "http://"+outer, forged(n)...).wantClient(t, visitor)
		}
		get(t, client, "http://"+outer, forged(9)...).wantDenied(t, interval)
	}
	if p := probe(t, clientFrom(t, "127.0.0.7"), "http://"+outer+"/client-ip"); p.client() != "127.0.0.7" || p.Source != "single_value" {
		t.Errorf("through the frontend: %+v", p)
	}

	relays = true
	if p := probe(t, clientFrom(t, "127.0.0.7"), "http://"+outer+"/client-ip"); p.client() != "unresolved" || p.Reason != "not_single" || p.Healthy {
		t.Errorf("a frontend that relays the chain: %+v", p)
	}
	get(t, clientFrom(t, "127.0.0.7"), "http://"+outer).wantClient(t, "")
}

// A backend for a frontend proves by a secret that it may state the client,
// beside visitors who come through nginx. The secret is seen nowhere.
func TestProofBesideNginx(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	const secret, old = "s3cret0fThisVeryTest", "0ldS3cretStillValid"
	app, addr := startUpstream(t), freeAddr(t)
	accessLog := filepath.Join(t.TempDir(), "access.log")
	c := startCaddy(t, "debug", site(addr, `
		log {
			output file `+accessLog+`
		}
		`+seenHeader+`
		edge_limit {
			client {
				trusted_proxies static 127.0.0.1
				hops 1
				proof Proxy-Authorization {env.EDGE_PROOF} {env.EDGE_PROOF_OLD}
			}
			`+fivePerHour+`
		}
		edge_limit_probe /client-ip {
			detail
		}
		reverse_proxy /broken 127.0.0.1:1
		reverse_proxy `+app.addr), "EDGE_PROOF="+secret, "EDGE_PROOF_OLD="+old)
	viaNginx, _ := nginxFront(t, addr, "proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;")
	direct := "http://" + addr + "/"
	bff, visitor := clientFrom(t, "127.0.0.30"), clientFrom(t, "127.0.0.5")

	var told []string // all that anybody was told
	tell := func(a answer) answer {
		told = append(told, string(a.body), fmt.Sprint(a.header))
		return a
	}

	// the frontend's users have their own budgets, over both secrets
	for n := range 5 {
		a := tell(get(t, bff, direct, "Proxy-Authorization: "+[]string{secret, old}[n%2], "X-Client-IP: 203.0.113.7",
			"X-Forwarded-For: "+forgedNet+"1.1"))
		a.wantClient(t, "203.0.113.7")
		if seen := a.header.Get("X-Seen"); seen != "203.0.113.7/proof/" {
			t.Errorf("the placeholders say %q", seen)
		}
		for _, name := range []string{"Proxy-Authorization", "X-Client-Ip"} {
			if got := a.received(t).Header[name]; got != nil {
				t.Errorf("the upstream got %s: %q", name, got)
			}
		}
	}
	tell(get(t, bff, direct, "Proxy-Authorization: "+secret, "X-Client-IP: 203.0.113.7")).wantDenied(t, interval)
	tell(get(t, bff, direct, "Proxy-Authorization: "+secret, "X-Client-IP: 203.0.113.8")).wantClient(t, "203.0.113.8")

	// visitors through nginx cannot state anything, whatever they present
	for _, headers := range [][]string{
		{"X-Client-IP: " + forgedNet + "1.1"},
		{"X-Client-IP: " + forgedNet + "1.2", "Proxy-Authorization: wrong"},
		{"X-Client-IP: " + forgedNet + "1.3", "Proxy-Authorization: " + secret + "x"},
		{"X-Client-IP: " + forgedNet + "1.4", "Proxy-Authorization: " + secret + ", " + secret},
		{"X-Client-IP: " + forgedNet + "1.5", "Proxy-Authorization: " + secret, "Proxy-Authorization: wrong"},
	} {
		a := tell(get(t, visitor, viaNginx, headers...))
		a.wantClient(t, "127.0.0.5")
		if got := a.received(t).Header["Proxy-Authorization"]; got != nil {
			t.Errorf("%q: the upstream got Proxy-Authorization: %q", headers, got)
		}
	}
	tell(get(t, visitor, viaNginx, "X-Client-IP: "+forgedNet+"1.6")).wantDenied(t, interval)
	// nor does a stranger's wrong proof on a connection of his own
	tell(get(t, clientFrom(t, "127.0.0.6"), direct, "X-Client-IP: "+forgedNet+"1.7", "Proxy-Authorization: wrong")).wantClient(t, "127.0.0.6")

	// the probe, an error, and everything that is written somewhere
	tell(get(t, bff, direct+"client-ip", "Proxy-Authorization: "+secret, "X-Client-IP: 203.0.113.9"))
	if a := tell(get(t, bff, direct+"broken", "Proxy-Authorization: "+secret, "X-Client-IP: 203.0.113.9")); a.status != http.StatusBadGateway {
		t.Errorf("a broken upstream: status %d", a.status)
	}
	told = append(told, c.metrics(t), c.output.String(), string(get(t, bff, "http://"+c.admin+"/config/").body))
	if log, err := os.ReadFile(accessLog); err != nil || !strings.Contains(string(log), "REDACTED") {
		t.Errorf("the access log shows no redacted proof: %v", err)
	} else {
		told = append(told, string(log))
	}
	err := filepath.WalkDir(c.home, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		told = append(told, string(text))
		return err
	})
	if err != nil {
		t.Error(err)
	}
	for _, text := range told {
		for _, word := range []string{secret, old} {
			if at := strings.Index(text, word); at >= 0 {
				t.Errorf("the secret was told: ...%s...", text[max(0, at-200):min(len(text), at+100)])
			}
		}
	}
}
