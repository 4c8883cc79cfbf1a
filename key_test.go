package edgelimit

import (
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
)

var testPepper = []byte("a pepper for tests only")

// newTestKey makes a template of the parts, cutting clients as by default.
func newTestKey(t testing.TB, parts ...string) *keyTemplate {
	t.Helper()
	parsed, err := parseKey(parts)
	if err != nil {
		t.Fatal(err)
	}
	template := &keyTemplate{parts: parsed, ipv4Bits: defaultIPv4Prefix, ipv6Bits: defaultIPv6Prefix}
	template.secret.Store(newKeySecret(testPepper, "limit"))
	return template
}

// hashValues is the key of a request in which the placeholders of a key, one for
// each part, stand for these values.
func hashValues(t testing.TB, values ...string) (key uint64, empty string) {
	t.Helper()
	var parts []string
	repl := caddy.NewEmptyReplacer()
	for i, value := range values {
		parts = append(parts, fmt.Sprintf("{test.%d}", i))
		repl.Set(fmt.Sprintf("test.%d", i), value)
	}
	return newTestKey(t, parts...).hash(&resolution{}, repl)
}

func resolutionOf(client string) *resolution {
	if client == "" {
		return &resolution{source: sourceUnresolved, reason: reasonMalformed}
	}
	return &resolution{client: netip.MustParseAddr(client), source: sourceTrustedProxies}
}

// What differs in any part is another key.
func TestKeysDiffer(t *testing.T) {
	mebibyte := strings.Repeat("x", 1<<20)
	for _, test := range []struct {
		why  string
		a, b []string
	}{
		{"text moved to the next part", []string{"aa", "b"}, []string{"a", "ab"}},
		{"all text moved", []string{"ab", ""}, []string{"", "ab"}},
		{"parts in another order", []string{"a", "b"}, []string{"b", "a"}},
		{"one part less", []string{"a", "b"}, []string{"ab"}},
		{"one part more, of the same text", []string{"a"}, []string{"a", "a"}},
		{"a bar, where another joins parts by bars", []string{"a|b", "c"}, []string{"a", "b|c"}},
		{"a bar and one part less", []string{"a|b"}, []string{"a", "b"}},
		{"a colon", []string{"a:b", "c"}, []string{"a", "b:c"}},
		{"a comma", []string{"a,b", "c"}, []string{"a", "b,c"}},
		{"a space", []string{"a b", "c"}, []string{"a", "b c"}},
		{"NUL", []string{"a\x00b", "c"}, []string{"a", "b\x00c"}},
		{"NUL at the end", []string{"a\x00"}, []string{"a"}},
		{"NULs only", []string{"\x00"}, []string{"\x00\x00"}},
		{"the tags of the material", []string{"\x04a", "b"}, []string{"a", "\x04b"}},
		{"what no UTF-8 is", []string{"\xff"}, []string{"\xfe"}},
		{"and what replaces it", []string{"\xff"}, []string{"\ufffd"}},
		{"another case", []string{"a"}, []string{"A"}},
		{"white space", []string{"a"}, []string{" a"}},
		{"a value that is empty", []string{""}, []string{" "}},
		{"a value that says so", []string{""}, []string{"unresolved"}},
		{"a mebibyte, its last byte", []string{mebibyte}, []string{mebibyte[1:] + "y"}},
		{"a mebibyte, its first byte", []string{mebibyte}, []string{"y" + mebibyte[1:]}},
		{"a mebibyte, one byte less", []string{mebibyte}, []string{mebibyte[1:]}},
		{"a mebibyte, moved to the next part", []string{mebibyte, "x"}, []string{mebibyte + "x", ""}},
		{"a mebibyte, one bit in the middle", []string{mebibyte}, []string{mebibyte[:1<<19] + "y" + mebibyte[1<<19+1:]}},
	} {
		a, _ := hashValues(t, test.a...)
		b, _ := hashValues(t, test.b...)
		if a == b {
			t.Errorf("%s: %.40q and %.40q have one key", test.why, test.a, test.b)
		}
		if again, _ := hashValues(t, test.a...); again != a {
			t.Errorf("%s: %.40q has two keys", test.why, test.a)
		}
	}
}

// No text is taken for a client, nor for the state of being unresolved or empty.
func TestKeyKindsDiffer(t *testing.T) {
	seen := make(map[uint64]string)
	add := func(what string, key uint64) {
		if before, ok := seen[key]; ok {
			t.Errorf("%s and %s have one key", what, before)
		}
		seen[key] = what
	}
	client := newTestKey(t, keyClient)
	for _, address := range []string{"203.0.113.7", "2001:db8::1", "::cb00:7107", ""} {
		key, _ := client.hash(resolutionOf(address), nil)
		add("the client "+address, key)
	}
	for _, value := range []string{"203.0.113.7", "2001:db8::1", "2001:db8::/64", "unresolved", "client", "", "\x00"} {
		key, _ := hashValues(t, value)
		add("the text "+value, key)
	}
	first := netip.MustParseAddr("203.0.113.7").As16()
	key, _ := hashValues(t, string(first[:]))
	add("the bytes of a client", key)
	key, _ = newTestKey(t, "literal").hash(&resolution{}, nil)
	add("literal text", key)
	if same, _ := hashValues(t, "literal"); same != key {
		t.Error("the same text has one key as literal text and another as a value")
	}
}

// Limits and peppers keep their keys apart, so that a client's key in one tells
// nothing about its key in another.
func TestKeySecrets(t *testing.T) {
	keys := make(map[uint64]string)
	for _, pepper := range []string{"a pepper for tests only", "another pepper"} {
		for _, limit := range []string{"a", "b", "ab"} {
			template := newTestKey(t, keyClient)
			template.secret.Store(newKeySecret([]byte(pepper), limit))
			key, _ := template.hash(resolutionOf(visitor), nil)
			if before, ok := keys[key]; ok {
				t.Errorf("limit %s with %q: the key of %s", limit, pepper, before)
			}
			keys[key] = limit + " with " + pepper
			again := newTestKey(t, keyClient)
			again.secret.Store(newKeySecret([]byte(pepper), limit))
			if same, _ := again.hash(resolutionOf(visitor), nil); same != key {
				t.Errorf("limit %s with %q: another key after a restart", limit, pepper)
			}
		}
	}
}

// The secret goes through the hash: where it was only mixed into a hash that
// anybody can compute, two keys would differ by the same under each secret, and
// collisions could be computed without it.
func TestHashIsKeyed(t *testing.T) {
	difference := func(pepper, key, one, other string) uint64 {
		var hashes [2]uint64
		for i, value := range []string{one, other} {
			template := newTestKey(t, key)
			template.secret.Store(newKeySecret([]byte(pepper), "limit"))
			repl := caddy.NewEmptyReplacer()
			repl.Set("test.value", value)
			hashes[i], _ = template.hash(resolutionOf(value), repl)
		}
		return hashes[0] ^ hashes[1]
	}
	for _, row := range []struct{ key, one, other string }{
		{keyClient, "203.0.113.7", "203.0.113.8"},
		{"{test.value}", "203.0.113.7", "203.0.113.8"},
	} {
		if difference("a pepper for tests only", row.key, row.one, row.other) == difference("another pepper", row.key, row.one, row.other) {
			t.Errorf("%s: the keys differ alike under two secrets", row.key)
		}
	}
}

// How clients are cut: what one customer or one network has is one key.
func TestKeyPrefixes(t *testing.T) {
	number := func(format string) func(int) string {
		return func(i int) string { return fmt.Sprintf(format, i+1) }
	}
	for _, test := range []struct {
		why                string
		ipv4Bits, ipv6Bits int
		address            func(int) string
		want               int // keys of 1000 addresses
	}{
		{"of one /64", 32, 64, number("2001:db8:0:1::%x"), 1},
		{"of 1000 /64s", 32, 64, number("2001:db8:0:%x::1"), 1000},
		{"of one /48, cut to it", 32, 48, number("2001:db8:1:%x::1"), 1},
		{"of 1000 /48s, cut to it", 32, 48, number("2001:db8:%x::1"), 1000},
		{"of one /64, not cut", 32, 128, number("2001:db8:0:1::%x"), 1000},
		{"behind NAT64", 32, 64, number("64:ff9b::cb00:%x"), 1000},
		{"behind NAT64, cut by their IPv4 address", 16, 64, number("64:ff9b::cb00:%x"), 1},
		{"next to the NAT64 prefix", 32, 64, number("64:ff9b::1:cb00:%x"), 1},
		{"behind NAT64 of one's own prefix, which is not known", 32, 64, number("64:ff9b:1::%x"), 1},
		{"IPv4", 32, 64, func(i int) string { return fmt.Sprintf("198.18.%d.%d", i>>8, i&255) }, 1000},
		{"IPv4 of one /22", 22, 64, func(i int) string { return fmt.Sprintf("198.18.%d.%d", i>>8, i&255) }, 1},
		{"IPv4 of four /24", 24, 64, func(i int) string { return fmt.Sprintf("198.18.%d.%d", i>>8, i&255) }, 4},
		{"IPv6 is not cut like IPv4", 8, 128, number("2001:db8::%x"), 1000},
	} {
		template := newTestKey(t, keyClient)
		template.ipv4Bits, template.ipv6Bits = test.ipv4Bits, test.ipv6Bits
		keys := make(map[uint64]bool)
		for i := range 1000 {
			key, empty := template.hash(resolutionOf(test.address(i)), nil)
			keys[key] = true
			if empty != "" {
				t.Errorf("%s: a client that is empty", test.why)
			}
		}
		if len(keys) != test.want {
			t.Errorf("1000 addresses %s: %d keys, want %d", test.why, len(keys), test.want)
		}
	}
	nat64, _ := newTestKey(t, keyClient).hash(resolutionOf("64:ff9b::203.0.113.7"), nil)
	if ipv4, _ := newTestKey(t, keyClient).hash(resolutionOf("203.0.113.7"), nil); nat64 != ipv4 {
		t.Error("a client behind NAT64 does not count by its IPv4 address")
	}
}

// One client in every form that a header can give it has one key: forms end where
// headers are read.
func TestKeyOfEveryForm(t *testing.T) {
	client := newTestClient(t, []string{"trusted_proxies static " + trustedRanges})
	for _, forms := range [][]string{
		{"203.0.113.7", "203.0.113.7:80", "::ffff:203.0.113.7", "::FFFF:cb00:7107", "[::ffff:203.0.113.7]:443", " 203.0.113.7 "},
		{"2001:db8::1", "2001:DB8:0:0:0:0:0:1", "[2001:db8::1]", "[2001:db8::1]:443", "2001:db8::1%eth0"},
	} {
		keys := make(map[uint64]bool)
		for _, form := range forms {
			r := newTestRequest(t, nil, trustedPeer+":1", requestText("GET /", "X-Forwarded-For: "+form))
			res := client.resolve(r, varsOf(r))
			key, _ := newTestKey(t, keyClient).hash(&res, nil)
			keys[key] = true
		}
		if len(keys) != 1 {
			t.Errorf("%q: %d keys", forms, len(keys))
		}
	}
}

// An empty value is a state of its own, with the name of the placeholder: not
// everybody's key, and not no key.
func TestEmptyParts(t *testing.T) {
	repl := caddy.NewEmptyReplacer()
	repl.Set("test.empty", "")
	repl.Set("test.nil", nil)
	repl.Set("test.full", "x")
	repl.Set("test.number", 0)
	for _, test := range []struct {
		why   string
		parts []string
		empty string
	}{
		{"a value", []string{"{test.full}"}, ""},
		{"zero is a value", []string{"{test.number}"}, ""},
		{"an empty value", []string{"{test.empty}"}, "test.empty"},
		{"no value", []string{"{test.nil}"}, "test.nil"},
		{"not set", []string{"{test.unknown}"}, "test.unknown"},
		{"beside a value", []string{"{test.full}", "{test.empty}"}, "test.empty"},
		{"beside the client", []string{"client", "{test.empty}"}, "test.empty"},
		{"inside a part: text around it does not fill it", []string{"x{test.empty}y"}, "test.empty"},
	} {
		if _, empty := newTestKey(t, test.parts...).hash(resolutionOf(visitor), repl); empty != test.empty {
			t.Errorf("%s: %q is said to be empty, want %q", test.why, empty, test.empty)
		}
	}

	// beside the client, an empty part leaves each client its own key
	template := newTestKey(t, "client", "{test.empty}")
	first, _ := template.hash(resolutionOf(visitor), repl)
	second, _ := template.hash(resolutionOf(otherVisitor), repl)
	if first == second {
		t.Error("an empty part makes all clients one")
	}
	full, _ := newTestKey(t, "client", "{test.full}").hash(resolutionOf(visitor), repl)
	if full == first {
		t.Error("an empty part counts like a full one")
	}
}

// A placeholder may cost more than all else, as one of a long query does: it is
// expanded once, also where it is empty.
func TestPlaceholdersAreExpandedOnce(t *testing.T) {
	for _, value := range []string{"x", ""} {
		expanded := 0
		repl := caddy.NewEmptyReplacer()
		repl.Map(func(string) (any, bool) {
			expanded++
			return value, true
		})
		newTestKey(t, "{http.request.uri.query.x}").hash(&resolution{}, repl)
		expect(t, expanded, 1, fmt.Sprintf("expansions to %q", value))
	}
}

// Placeholders are Caddy's own, and what a header holds goes into the key as it
// is, with NUL and invalid UTF-8.
func TestKeyOfHeader(t *testing.T) {
	key := func(value string) uint64 {
		r := newTestRequest(t, nil, strangePeer+":1", requestText("GET /"))
		r.Header["X-Api-Key"] = []string{value}
		res := newTestClient(t, nil).resolve(r, varsOf(r))
		repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
		hash, empty := newTestKey(t, "{http.request.header.X-Api-Key}").hash(&res, repl)
		if (empty != "") != (value == "") {
			t.Errorf("%.20q: empty is %q", value, empty)
		}
		return hash
	}
	seen := make(map[uint64]string)
	for _, value := range []string{"", "a", "a\x00", "\xff", "\xfe", "{env.HOME}", strings.Repeat("a", 1<<20), strings.Repeat("a", 1<<20+1)} {
		hash := key(value)
		if before, ok := seen[hash]; ok {
			t.Errorf("%.20q and %.20q have one key", value, before)
		}
		seen[hash] = value
	}
}

func TestKeyErrors(t *testing.T) {
	for _, test := range []struct {
		why   string
		parts []string
		want  string // in the error; "" for none
	}{
		{"nothing: the client", nil, ""},
		{"the client", []string{"client"}, ""},
		{"a placeholder", []string{"{http.request.host}"}, ""},
		{"text and placeholders", []string{"a{http.request.host}b{http.request.uri.path}c"}, ""},
		{"sixteen parts", slices.Repeat([]string{"a"}, 16), ""},
		{"seventeen parts", slices.Repeat([]string{"a"}, 17), "at most 16"},
		{"an empty part", []string{""}, "empty"},
		{"a brace that is not closed", []string{"{http.request.host"}, "not closed"},
		{"an unknown shorthand", []string{"{nothing}"}, "no placeholder"},
		{"empty braces", []string{"{}"}, "no placeholder"},
		{"braces in braces", []string{"{http.{x}}"}, "no placeholder"},
		{"the client under Caddy's name", []string{"{http.vars.client_ip}"}, "write key client"},
		{"inside a part", []string{"user-{http.vars.client_ip}"}, "write key client"},
		{"beside others", []string{"client", "{http.vars.client_ip}"}, "write key client"},
		{"the client under our name", []string{"{http.edge_limit.client_ip}"}, "write key client"},
		{"its key form under our name", []string{"{http.edge_limit.client}"}, "write key client"},
	} {
		_, err := parseKey(test.parts)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want %q", test.why, err, test.want)
		}
	}
}

// A key costs no memory where the client is all of it, and little elsewhere,
// however long a value is.
func TestKeyAllocations(t *testing.T) {
	repl := caddy.NewEmptyReplacer()
	repl.Set("test.short", "value")
	repl.Set("test.long", strings.Repeat("x", 1<<20))
	for _, test := range []struct {
		why    string
		client string
		parts  []string
		most   float64
	}{
		{"an IPv4 client", visitor, []string{"client"}, 0},
		{"an IPv6 client", "2001:db8::1", []string{"client"}, 0},
		{"a client behind NAT64", "64:ff9b::203.0.113.7", []string{"client"}, 0},
		{"nobody", "", []string{"client"}, 0},
		{"client and text", visitor, []string{"client", "login"}, 0},
		{"client and a placeholder", visitor, []string{"client", "{test.short}"}, 2},
		{"a long value", visitor, []string{"{test.long}"}, 2},
		{"long values in one part", visitor, []string{"{test.long}-{test.long}"}, 6},
	} {
		template, res := newTestKey(t, test.parts...), resolutionOf(test.client)
		if allocations := testing.AllocsPerRun(100, func() { template.hash(res, repl) }); allocations > test.most {
			t.Errorf("%s: %v allocations, want at most %v", test.why, allocations, test.most)
		}
	}
}

// cutParts cuts text into parts where the mask says so.
func cutParts(text string, mask uint64) []string {
	parts := []string{}
	start := 0
	for i := range len(text) {
		if mask>>(i%64)&1 == 1 && len(parts) < maxKeyParts-1 {
			parts = append(parts, text[start:i])
			start = i
		}
	}
	return append(parts, text[start:])
}

// FuzzKey: two lists of parts are equal if and only if their keys are.
func FuzzKey(f *testing.F) {
	for _, text := range []string{"", "aab", "a|b:c", "a\x00\x00b", "\xff\xfe\xfd", "unresolved", "client", strings.Repeat("ab", 100)} {
		f.Add(text, uint64(0), text, uint64(1))
		f.Add(text, uint64(2), text, uint64(4))
		f.Add(text, uint64(3), text+"x", uint64(3))
		f.Add(text, uint64(6), text, uint64(6))
	}
	f.Fuzz(func(t *testing.T, a string, maskA uint64, b string, maskB uint64) {
		partsA, partsB := cutParts(a, maskA), cutParts(b, maskB)
		keyA, emptyA := hashValues(t, partsA...)
		keyB, _ := hashValues(t, partsB...)
		if equal := slices.Equal(partsA, partsB); equal != (keyA == keyB) {
			t.Errorf("%q and %q: equal is %t, and their keys are %x and %x", partsA, partsB, equal, keyA, keyB)
		}
		if empty := slices.Contains(partsA, ""); empty != (emptyA != "") {
			t.Errorf("%q: said to be empty: %q", partsA, emptyA)
		}
	})
}

// Who writes what a key is made of. A part that callers write can be renewed with
// each request; what is not known to be somebody else's is theirs.
func TestProvenance(t *testing.T) {
	for _, test := range []struct {
		why      string
		part     string
		byCaller bool
	}{
		{"the client is resolved", "client", false},
		{"text is the configuration's", "login", false},
		{"text that looks like a placeholder's name", "http.request.header.X", false},
		{"the peer's address is the connection's", "{http.request.remote.host}", false},
		{"a prefix of it too", "{http.request.remote.host/24,64}", false},
		{"the socket that was reached", "{http.request.local}", false},
		{"its address", "{http.request.local.host}", false},
		{"its port", "{http.request.local.port}", false},
		{"TLS or not", "{http.request.scheme}", false},
		{"a user that was authenticated", "{http.auth.user.id}", false},
		{"what the authenticator says of him", "{http.auth.user.name}", false},
		{"the environment", "{env.REGION}", false},
		{"a file", "{file./etc/region}", false},
		{"the machine", "{system.hostname}", false},

		{"text around a caller's value does not make it another's", "user-{http.request.header.X-Api-Key}", true},
		{"nor does a value of the connection beside it", "{http.request.remote.host}{http.request.header.X-Api-Key}", true},
		{"a header", "{http.request.header.X-Api-Key}", true},
		{"a header that a proxy may have set: the key cannot know", "{http.request.header.X-Forwarded-For}", true},
		{"credentials that nobody checked", "{http.request.header.Authorization}", true},
		{"a cookie", "{http.request.cookie.session}", true},
		{"the path", "{http.request.uri.path}", true},
		{"a part of it", "{http.request.uri.path.0}", true},
		{"the address with its query", "{http.request.uri}", true},
		{"the query", "{http.request.uri.query}", true},
		{"a value in it", "{http.request.uri.query.token}", true},
		{"before rewriting too", "{http.request.orig_uri.path}", true},
		{"the method, of which there can be any", "{http.request.method}", true},
		{"the host", "{http.request.host}", true},
		{"a label of it", "{http.request.host.labels.0}", true},
		{"the host with its port", "{http.request.hostport}", true},
		{"the port in it", "{http.request.port}", true},
		{"the protocol, which callers choose", "{http.request.proto}", true},
		{"the body", "{http.request.body}", true},
		{"a form", "{http.request.body_base64}", true},
		{"the peer's port, new with each connection", "{http.request.remote.port}", true},
		{"and with it the peer as a whole", "{http.request.remote}", true},
		{"a certificate that may be self-made", "{http.request.tls.client.fingerprint}", true},
		{"its subject", "{http.request.tls.client.subject}", true},
		{"its key", "{http.request.tls.client.public_key_sha256}", true},
		{"its names", "{http.request.tls.client.san.dns_names.0}", true},
		{"the name asked for", "{http.request.tls.server_name}", true},
		{"the cipher, which callers choose", "{http.request.tls.cipher_suite}", true},
		{"the version too", "{http.request.tls.version}", true},
		{"a number that is new with each request", "{http.request.uuid}", true},
		{"the time", "{time.now.unix_ms}", true},
		{"how long it took", "{http.request.duration_ms}", true},
		{"a variable, which may hold anything", "{http.vars.tenant}", true},
		{"what an expression found in the path", "{http.regexp.id.1}", true},
		{"what a file matcher found", "{http.matchers.file.relative}", true},
		{"what a map made of a header", "{http.map.tenant}", true},
		{"what the upstream sent", "{http.reverse_proxy.header.X-User}", true},
		{"what the response says", "{http.response.header.X-User}", true},
		{"an error", "{http.error.message}", true},
		{"why a client is believed, which callers can influence", "{http.edge_limit.reason}", true},
		{"another plugin's", "{other.plugin.value}", true},
		{"a name that begins like a known one", "{environment.X}", true},
		{"or goes on where a known one ends", "{http.request.remote.hostname}", true},
		{"or differs in case, which Caddy's names do not", "{ENV.X}", true},
	} {
		parts, err := parseKey([]string{test.part})
		if err != nil {
			t.Errorf("%s: %v", test.why, err)
			continue
		}
		if got := callerWritten(parts); (got != "") != test.byCaller {
			t.Errorf("%s: %s is written by the caller: %t, want %t", test.why, test.part, got != "", test.byCaller)
		}
		// beside the client it is the same
		beside, err := parseKey([]string{"client", test.part})
		if err != nil {
			t.Fatal(err)
		}
		if got := callerWritten(beside); (got != "") != test.byCaller {
			t.Errorf("%s: beside the client %s is written by the caller: %t, want %t", test.why, test.part, got != "", test.byCaller)
		}
	}
}

// All headers under which a caller could pass for another address are written by
// the caller when a key names them itself.
func TestProvenanceOfIdentityHeaders(t *testing.T) {
	for _, name := range wantIdentity {
		for _, spelling := range []string{name, strings.ToLower(name), http.CanonicalHeaderKey(name)} {
			parts, err := parseKey([]string{"{http.request.header." + spelling + "}"})
			if err != nil {
				t.Fatal(err)
			}
			if callerWritten(parts) == "" {
				t.Errorf("a key of %s passes for one that callers do not write", spelling)
			}
		}
	}
}
