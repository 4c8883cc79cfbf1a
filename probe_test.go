package edgelimit

import (
	"encoding/json"
	"net/http"
	"reflect"
	"strings"
	"testing"
)

// probe asks the probe of a site and decodes what it answers.
func (i *instance) probe(t *testing.T, r *http.Request) (answer map[string]any) {
	t.Helper()
	w := i.send(r)
	expect(t, w.Code, http.StatusOK, "status")
	expect(t, w.Header().Get("Content-Type"), "application/json", "Content-Type")
	expect(t, w.Header().Get("Cache-Control"), "no-store", "Cache-Control")
	if err := json.Unmarshal(w.Body.Bytes(), &answer); err != nil {
		t.Fatalf("%v in %s", err, w.Body)
	}
	return answer
}

// probed makes a site with a probe from the lines of the client block.
func probed(t *testing.T, client string) *instance {
	t.Helper()
	if client != "" {
		client = "client {\n" + client + "\n}"
	}
	return newInstance(t, "http://test.local {\nedge_limit {\n"+client+"\n}\nedge_limit_probe /client-ip\nrespond ok\n}")
}

func TestProbe(t *testing.T) {
	const (
		ranges  = "trusted_proxies static 10.0.0.0/8"
		hops    = ranges + "\nhops 2"
		guessed = ranges + "\nhops 2 unverified"
		single  = ranges + "\nsingle_value"
		proof   = "proof Proxy-Authorization correct-horse-battery-staple"
		proves  = "Proxy-Authorization: correct-horse-battery-staple"
		proxy   = "10.0.0.1"
	)
	type row struct {
		reason  string
		client  string
		peer    string
		headers []string

		resolved string // "" is null
		source   string
		why      string
		hops     int
		spoof    string // true, false or null
		healthy  bool
		advice   []string // all that it must say; none: it is empty
	}
	for _, row := range []row{
		{"nothing in front", "", alice, nil,
			alice, "connection", "", 0, "null", true, nil},
		{"nothing in front, and a forged header", "", alice, []string{"X-Forwarded-For: 6.6.6.6"},
			alice, "connection", "", 0, "true", true, nil},
		{"a forged header of another name", "", alice, []string{"X-Real-IP: 6.6.6.6"},
			alice, "connection", "", 0, "true", true, nil},
		{"a forged Forwarded", "", alice, []string{"Forwarded: for=6.6.6.6"},
			alice, "connection", "", 0, "true", true, nil},
		{"a header that says nothing about the client", "", alice, []string{"X-Forwarded-Proto: https", "X-Request-Id: 6.6.6.6"},
			alice, "connection", "", 0, "null", true, nil},
		{"IPv6", "", "2001:db8::7", nil,
			"2001:db8::7", "connection", "", 0, "null", true, nil},
		{"IPv4 over IPv6", "", "::ffff:203.0.113.7", nil,
			alice, "connection", "", 0, "null", true, nil},

		{"a proxy that is not in the configuration", "", "192.168.7.1", []string{"X-Forwarded-For: " + alice},
			"192.168.7.1", "connection", "untrusted_header", 0, "true", false,
			[]string{"trusted_proxies static 192.168.0.0/16", "client connection", "one budget"}},
		{"the same on loopback", "", "127.0.0.1", []string{"X-Forwarded-For: " + alice},
			"127.0.0.1", "connection", "untrusted_header", 0, "true", false, []string{"trusted_proxies static 127.0.0.0/8"}},

		{"one proxy", ranges, proxy, []string{"X-Forwarded-For: " + alice},
			alice, "trusted_proxies", "", 1, "null", true, nil},
		{"one proxy, and a forged entry", ranges, proxy, []string{"X-Forwarded-For: 6.6.6.6, " + alice},
			alice, "trusted_proxies", "", 1, "true", true, nil},
		{"one proxy, and a forged line", ranges, proxy, []string{"X-Forwarded-For: 6.6.6.6", "X-Forwarded-For: " + alice},
			alice, "trusted_proxies", "", 1, "true", true, nil},
		{"three proxies", ranges, proxy, []string{"X-Forwarded-For: " + alice + ", 10.0.0.3, 10.0.0.2"},
			alice, "trusted_proxies", "", 3, "null", true, nil},
		{"all are proxies: the rightmost", ranges, proxy, []string{"X-Forwarded-For: 10.0.0.2"},
			"10.0.0.2", "trusted_proxies", "", 1, "null", true, nil},
		{"past the proxy", ranges, alice, []string{"X-Forwarded-For: 6.6.6.6"},
			alice, "connection", "", 0, "true", true, nil},

		{"a proxy that sends nothing", ranges, proxy, nil,
			"", "unresolved", "missing_header", 1, "null", false,
			[]string{"your proxy sends no X-Forwarded-For", "proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for", "health checks"}},
		{"a proxy that sends another header", ranges + "\nheader X-Real-IP", proxy, []string{"X-Forwarded-For: " + alice},
			"", "unresolved", "missing_header", 1, "null", false, []string{"your proxy sends no X-Real-Ip"}},
		{"a proxy that sends no address", ranges, proxy, []string{"X-Forwarded-For: unknown"},
			"", "unresolved", "malformed", 1, "null", false, []string{"X-Forwarded-For", "no address"}},
		{"the same, and a forged entry", ranges, proxy, []string{"X-Forwarded-For: 6.6.6.6, unknown"},
			"", "unresolved", "malformed", 1, "true", false, []string{"X-Forwarded-For", "no address"}},
		{"a peer without an address", "", "@", nil,
			"", "unresolved", "no_address", 0, "null", false, []string{"trusted_proxies_unix"}},

		{"hops", hops, proxy, []string{"X-Forwarded-For: " + alice + ", 10.0.0.2"},
			alice, "hops", "", 2, "null", true, nil},
		{"hops, and a forged entry", hops, proxy, []string{"X-Forwarded-For: 6.6.6.6, " + alice + ", 10.0.0.2"},
			alice, "hops", "", 2, "true", true, nil},
		{"fewer entries than hops", hops, proxy, []string{"X-Forwarded-For: " + alice},
			alice, "hops", "short_chain", 1, "null", false, []string{"shorter than hops", "too high is the dangerous direction"}},
		{"hops over a stranger", hops, proxy, []string{"X-Forwarded-For: 6.6.6.6, " + alice},
			alice, "hops", "unverified_hop", 1, "true", false, []string{"no trusted proxy", "reaches an inner proxy directly"}},
		{"unverified hops: it could be the caller's", guessed, proxy, []string{"X-Forwarded-For: 6.6.6.6, " + alice},
			"6.6.6.6", "hops", "", 2, "false", false, []string{"rests on unverified hops"}},
		{"fewer entries than unverified hops", guessed, proxy, []string{"X-Forwarded-For: " + alice},
			alice, "hops", "short_chain", 1, "null", false, []string{"shorter than hops"}},

		{"a single value", single, proxy, []string{"X-Forwarded-For: " + alice},
			alice, "single_value", "", 1, "null", true, nil},
		{"two values", single, proxy, []string{"X-Forwarded-For: 6.6.6.6, " + alice},
			"", "unresolved", "not_single", 1, "true", false, []string{"exactly one address", "not append to it"}},

		{"a proof", proof, bob, []string{proves, "X-Client-IP: " + alice},
			alice, "proof", "", 1, "null", true, nil},
		{"a proof, and what the sender was sent", proof, bob, []string{proves, "X-Client-IP: " + alice, "X-Forwarded-For: 6.6.6.6"},
			alice, "proof", "", 1, "true", true, nil},
		{"a wrong proof", proof, bob, []string{"Proxy-Authorization: guessed", "X-Client-IP: " + alice},
			bob, "connection", "", 0, "true", true, nil},
		{"a proof without a client", proof, bob, []string{proves},
			"", "unresolved", "missing_header", 1, "null", false, []string{"must state the client", "X-Client-Ip"}},
		{"a proof with two clients", proof, bob, []string{proves, "X-Client-IP: " + alice + ", " + bob},
			"", "unresolved", "not_single", 1, "null", false, []string{"exactly one address", "X-Client-Ip"}},
		{"a proof with no address", proof, bob, []string{proves, "X-Client-IP: hello"},
			"", "unresolved", "malformed", 1, "null", false, []string{"X-Client-Ip", "no address"}},
	} {
		t.Run(row.reason, func(t *testing.T) {
			i := probed(t, row.client)
			answer := i.probe(t, requestFrom(row.peer, "/client-ip", row.headers...))
			advice, _ := answer["advice"].(string)
			delete(answer, "advice")
			want := map[string]any{
				"resolved": nil, "source": row.source, "reason": row.why, "trustedProxyHops": float64(row.hops),
				"spoofIgnored": map[string]any{"true": true, "false": false, "null": nil}[row.spoof], "healthy": row.healthy,
			}
			if row.resolved != "" {
				want["resolved"] = row.resolved
			}
			if !reflect.DeepEqual(answer, want) {
				t.Errorf("got  %v\nwant %v", answer, want)
			}
			if (len(row.advice) == 0) != (advice == "") {
				t.Errorf("advice %q, want %q", advice, row.advice)
			}
			for _, part := range row.advice {
				if !strings.Contains(advice, part) {
					t.Errorf("the advice does not say %q: %s", part, advice)
				}
			}
			for _, secret := range []string{"correct-horse", "6.6.6.6", "guessed"} {
				if strings.Contains(advice, secret) {
					t.Errorf("the advice holds %q: %s", secret, advice)
				}
			}
		})
	}
}

// detail adds the peer, and the chain from left to right: who wrote each entry
// and whether it was read.
func TestProbeDetail(t *testing.T) {
	const (
		ranges = "trusted_proxies static 10.0.0.0/8"
		proof  = "proof Proxy-Authorization correct-horse-battery-staple"
		proves = "Proxy-Authorization: correct-horse-battery-staple"
	)
	type entry struct {
		Entry, Writer string
		Read          bool
	}
	for _, row := range []struct {
		reason  string
		client  string
		peer    string
		headers []string
		want    []entry
	}{
		{"no chain", "", alice + ":1", nil, nil},
		{"a chain that is not read", "", alice + ":1", []string{"X-Forwarded-For: 6.6.6.6, 7.7.7.7"},
			[]entry{{"6.6.6.6", "caller", false}, {"7.7.7.7", "caller", false}}},
		{"one proxy", ranges, "10.0.0.1:1", []string{"X-Forwarded-For: " + alice},
			[]entry{{alice, "peer", true}}},
		{"two proxies and a forged entry", ranges, "10.0.0.1:1", []string{"X-Forwarded-For: 6.6.6.6, " + alice + ", 10.0.0.2"},
			[]entry{{"6.6.6.6", "caller", false}, {alice, "10.0.0.2", true}, {"10.0.0.2", "peer", true}}},
		{"the same over several lines, with ports and spaces", ranges, "10.0.0.1:1",
			[]string{"X-Forwarded-For: 6.6.6.6", "X-Forwarded-For:  " + alice + ":99 ,\t10.0.0.2"},
			[]entry{{"6.6.6.6", "caller", false}, {alice + ":99", "10.0.0.2", true}, {"10.0.0.2", "peer", true}}},
		{"all are proxies: the rightmost is the client", ranges, "10.0.0.1:1", []string{"X-Forwarded-For: 10.0.0.3, 10.0.0.2"},
			[]entry{{"10.0.0.3", "caller", false}, {"10.0.0.2", "peer", true}}},
		{"no address", ranges, "10.0.0.1:1", []string{"X-Forwarded-For: 6.6.6.6, hello, 10.0.0.2"},
			[]entry{{"6.6.6.6", "caller", false}, {"hello", "10.0.0.2", true}, {"10.0.0.2", "peer", true}}},
		{"an empty entry", ranges, "10.0.0.1:1", []string{"X-Forwarded-For: 6.6.6.6, "},
			[]entry{{"6.6.6.6", "caller", false}, {"", "peer", true}}},
		{"hops", ranges + "\nhops 2", "10.0.0.1:1", []string{"X-Forwarded-For: 6.6.6.6, " + alice + ", 10.0.0.2"},
			[]entry{{"6.6.6.6", "caller", false}, {alice, "10.0.0.2", true}, {"10.0.0.2", "peer", true}}},
		{"hops over a stranger", ranges + "\nhops 2", "10.0.0.1:1", []string{"X-Forwarded-For: 6.6.6.6, " + alice},
			[]entry{{"6.6.6.6", "caller", false}, {alice, "peer", true}}},
		{"unverified hops", ranges + "\nhops 3 unverified", "10.0.0.1:1", []string{"X-Forwarded-For: 5.5.5.5, 6.6.6.6, hello, " + alice},
			[]entry{{"5.5.5.5", "caller", false}, {"6.6.6.6", "unverified", true}, {"hello", "unverified", true}, {alice, "peer", true}}},
		{"Forwarded", ranges + "\nheader Forwarded", "10.0.0.1:1", []string{`Forwarded: for="6,6", for=` + alice + `, for=10.0.0.2;by=10.0.0.1`},
			[]entry{{`for="6,6"`, "caller", false}, {"for=" + alice, "10.0.0.2", true}, {"for=10.0.0.2;by=10.0.0.1", "peer", true}}},
		{"a proof: the chain is not read", proof, bob + ":1", []string{proves, "X-Client-IP: " + alice, "X-Forwarded-For: 6.6.6.6"},
			[]entry{{"6.6.6.6", "caller", false}}},
		{"a proof through a trusted proxy", ranges + "\n" + proof, "10.0.0.1:1", []string{proves, "X-Client-IP: " + alice, "X-Forwarded-For: " + bob},
			[]entry{{bob, "caller", false}}},
		{"a proof through a trusted proxy, without a client: the chain is not read either", ranges + "\n" + proof, "10.0.0.1:1",
			[]string{proves, "X-Forwarded-For: " + bob},
			[]entry{{bob, "caller", false}}},
	} {
		t.Run(row.reason, func(t *testing.T) {
			client := row.client
			if client != "" {
				client = "client {\n" + client + "\n}"
			}
			i := newInstance(t, "http://test.local {\nedge_limit {\n"+client+"\n}\nedge_limit_probe /client-ip {\ndetail\n}\n}")
			answer := i.probe(t, requestFrom(row.peer, "/client-ip", row.headers...))
			expect(t, answer["peer"], any(row.peer), "peer")
			var got []entry
			text, _ := json.Marshal(answer["chain"])
			if err := json.Unmarshal(text, &got); err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, row.want) {
				t.Errorf("chain\ngot  %v\nwant %v", got, row.want)
			}
		})
	}
}

// Without detail nothing of the topology is shown.
func TestProbeWithoutDetail(t *testing.T) {
	i := probed(t, "trusted_proxies static 10.0.0.0/8")
	w := i.send(requestFrom("10.0.0.1", "/client-ip", "X-Forwarded-For: 6.6.6.6, "+alice+", 10.0.0.2"))
	for _, hidden := range []string{"10.0.0.1", "10.0.0.2", "6.6.6.6", "peer", "chain"} {
		if strings.Contains(w.Body.String(), hidden) {
			t.Errorf("%s is shown: %s", hidden, w.Body)
		}
	}
}

// A chain of any length takes a bounded answer, and none is shown from the left.
func TestProbeDetailIsBounded(t *testing.T) {
	i := newInstance(t, "http://test.local {\nedge_limit {\nclient {\ntrusted_proxies static 10.0.0.0/8\n}\n}\nedge_limit_probe {\ndetail\n}\n}")
	answer := i.probe(t, requestFrom("10.0.0.1", "/", "X-Forwarded-For: "+strings.Repeat("6.6.6.6, ", 5000)+alice))
	chain, _ := answer["chain"].([]any)
	if len(chain) == 0 || len(chain) > maxHops {
		t.Fatalf("%d entries", len(chain))
	}
	last, _ := chain[len(chain)-1].(map[string]any)
	expect(t, last["entry"], any(alice), "the last entry")
}

// A probe alone says what is missing, and answers nothing about the client.
func TestProbeWithoutEdgeLimit(t *testing.T) {
	i := newInstance(t, "http://test.local {\nedge_limit_probe {\ndetail\n}\n}")
	answer := i.probe(t, requestFrom(alice, "/", "X-Forwarded-For: 6.6.6.6"))
	advice, _ := answer["advice"].(string)
	delete(answer, "advice")
	want := map[string]any{
		"resolved": nil, "source": "unresolved", "reason": "", "trustedProxyHops": 0.0, "spoofIgnored": nil, "healthy": false,
	}
	if !reflect.DeepEqual(answer, want) {
		t.Errorf("got  %v\nwant %v", answer, want)
	}
	if !strings.Contains(advice, "no edge_limit came before the probe") {
		t.Errorf("advice %q", advice)
	}
}

// What another handler changes on the way is not what the probe tells of: it is
// how the request came in.
func TestProbeTellsWhatCame(t *testing.T) {
	i := newInstance(t, `http://test.local {
	route {
		edge_limit {
			client {
				trusted_proxies static 10.0.0.0/8
			}
		}
		request_header X-Forwarded-For 9.9.9.9
		vars client_ip 9.9.9.9
		edge_limit {
			client connection
		}
		edge_limit_probe {
			detail
		}
	}
}`)
	answer := i.probe(t, requestFrom("10.0.0.1", "/", "X-Forwarded-For: "+alice))
	expect(t, answer["resolved"], any(alice), "resolved")
	expect(t, answer["source"], any("trusted_proxies"), "source")
	expect(t, answer["peer"], any("10.0.0.1:4711"), "peer")
	expect(t, len(answer["chain"].([]any)), 1, "entries")
}

// The probe itself is limited as the site is, and its matcher says where it is.
func TestProbeIsLimited(t *testing.T) {
	i := newInstance(t, "http://test.local {\nedge_limit {\nlimit all 2/h\n}\nedge_limit_probe /client-ip\nrespond elsewhere 404\n}")
	expect(t, i.get(alice, "/client-ip"), http.StatusOK, "first")
	expect(t, i.get(alice, "/other"), http.StatusNotFound, "elsewhere")
	expect(t, i.get(alice, "/client-ip"), http.StatusTooManyRequests, "third")
}
