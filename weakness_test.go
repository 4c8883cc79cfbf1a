package edgelimit

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// These tests pin what edge_limit does not do. Each says what is known, and what
// would make it untrue. One that fails is news: the situation that it describes
// has changed, and so must the documentation.

// Known: a key that the caller writes is renewed at will. A limit with such a key
// throttles accidents, not attempts; only what never looks at the request bounds
// them. That is why such a limit does not load without a ceiling beside it.
//
// Untrue when: header values were verified before they became keys, or keys were
// bounded in number for each client.
func TestWeaknessRotatedKeyEscapesItsLimit(t *testing.T) {
	i := newInstance(t, `http://test.local {
	edge_limit {
		limit tenant 5/h {
			key {http.request.header.X-Api-Key}
		}
		ceiling all 100/h
	}
	respond ok
}`)
	expect(t, i.passed(50, alice, "/", "X-Api-Key: honest"), 5, "requests with one key pass")
	passed := 0
	for n := range 500 {
		if i.get(alice, "/", fmt.Sprintf("X-Api-Key: %d", n)) == 200 {
			passed++
		}
	}
	expect(t, passed, 95, "requests of the same client with rotated keys pass, and the ceiling holds all the same")
	expect(t, i.get(bob, "/", "X-Api-Key: another"), http.StatusServiceUnavailable,
		"the price: while the ceiling is used up it denies everybody")
}

// Known: the same limit loads without a ceiling when somebody says that he knows.
// Then nothing bounds it.
//
// Untrue when: key_writer caller is refused, or bounds the number of keys.
func TestWeaknessKeyWriterCallerIsUnbounded(t *testing.T) {
	i := newInstance(t, `http://test.local {
	edge_limit {
		limit tenant 5/h {
			key {http.request.header.X-Api-Key}
			key_writer caller
		}
	}
	respond ok
}`)
	passed := 0
	for n := range 500 {
		if i.get(alice, "/", fmt.Sprintf("X-Api-Key: %d", n)) == 200 {
			passed++
		}
	}
	expect(t, passed, 500, "requests of one client with rotated keys pass")
}

// Known: each instance counts by itself. Two of them admit twice the ceiling, and
// twice each limit; the true bound is the number times the instances that happen
// to be up.
//
// Untrue when: budgets are kept in a store that instances share, and this
// configuration names it.
func TestWeaknessTwoInstancesAdmitTwice(t *testing.T) {
	const caddyfile = `http://test.local {
	edge_limit {
		limit each 5/h
		ceiling all 10/h
	}
	respond ok
}`
	one := newInstance(t, caddyfile)
	pool := states
	t.Cleanup(func() { states = pool })
	states = caddy.NewUsagePool() // as another process has it
	two := newInstance(t, caddyfile)

	passed := 0
	for _, i := range []*instance{one, two} {
		passed += i.passed(20, alice, "/")
	}
	expect(t, passed, 10, "requests of one client pass both instances, with a limit of 5")
	for n := range 40 {
		if []*instance{one, two}[n%2].get(clientNumber(n), "/") == 200 {
			passed++
		}
	}
	expect(t, passed, 20, "requests pass both instances, with a ceiling of 10")
}

// Known: a proxy that is trusted, adds nothing to the header, and passes on what
// callers write is as no proxy at all. Honest visitors, who send no header, are
// unresolved and share one budget; whoever forges one is believed and has a
// budget for each address he makes up. Nothing in the request gives it away. The
// missing header is warned of, and the command that probes from outside finds it.
//
// Untrue when: the proxy has to prove that it wrote the header.
func TestWeaknessSilentProxyInverts(t *testing.T) {
	i := newInstance(t, `http://test.local {
	edge_limit {
		client {
			trusted_proxies static 10.0.0.1
		}
		limit each 5/h
	}
	respond "{http.edge_limit.client_ip}"
}`)
	const proxy = "10.0.0.1"
	w := i.send(requestFrom(proxy, "/"))
	expect(t, w.Body.String(), "unresolved", "an honest visitor is")
	expect(t, i.passed(50, proxy, "/"), 4, "requests of all honest visitors together pass, beside that one")
	for n := range 50 {
		w := i.send(requestFrom(proxy, "/", "X-Forwarded-For: "+clientNumber(n)))
		expect(t, w.Code, 200, "the forger passes")
		expect(t, w.Body.String(), clientNumber(n), "as whom he likes")
	}
}

// Known: GCRA lets the burst pass at once and refills meanwhile, so in a first
// window up to twice the count passes, and in no window more. Who needs the exact
// count takes a ceiling, or a burst of one.
//
// Untrue when: limits count in windows.
func TestWeaknessTwiceTheCountInFirstWindow(t *testing.T) {
	for _, row := range []struct {
		reason string
		budget string
		within int // requests that pass in the first minute
	}{
		{"a limit", "limit b 60/m", 119},
		{"a limit with a burst of one", "limit b 60/m {\nburst 1\n}", 60},
		{"a ceiling", "ceiling b 60/m", 60},
	} {
		t.Run(row.reason, func(t *testing.T) {
			i := newInstance(t, "http://test.local {\nedge_limit {\n"+row.budget+"\n}\nrespond ok\n}")
			passed := 0
			for range 600 { // a minute of hammering
				if i.get(alice, "/") == 200 {
					passed++
				}
				i.sleep(100 * time.Millisecond)
			}
			expect(t, passed, row.within, "requests pass in the first minute")
		})
	}
}

// Known: who shares an address shares a budget: an office, a school, a carrier's
// NAT, the guests of one IPv6 router. The address is all that a connection tells.
//
// Untrue when: clients are told apart by something that they cannot renew.
func TestWeaknessClientsBehindOneAddressShare(t *testing.T) {
	for _, row := range []struct {
		reason          string
		first, neighbor string
	}{
		{"two people behind one NAT", alice + ":50001", alice + ":50002"},
		{"two machines in one IPv6 network", "[2001:db8:1:2::a]:1", "[2001:db8:1:2::b]:1"},
	} {
		t.Run(row.reason, func(t *testing.T) {
			i := newInstance(t, "http://test.local {\nedge_limit {\nlimit each 5/h\n}\nrespond ok\n}")
			expect(t, i.passed(50, row.first, "/"), 5, "requests of the first one pass")
			expect(t, i.get(row.neighbor, "/"), http.StatusTooManyRequests, "the other one is denied")
		})
	}
}

// Known: and the other way round. Who has many addresses has many budgets: one
// for each IPv4 address, and one for each /64, of which a single customer can
// have 256 in a /56.
//
// Untrue when: limits look at more than one prefix.
func TestWeaknessManyAddressesAreManyClients(t *testing.T) {
	i := newInstance(t, "http://test.local {\nedge_limit {\nlimit each 5/h\n}\nrespond ok\n}")
	passed := 0
	for n := range 256 {
		passed += i.passed(10, fmt.Sprintf("2001:db8:0:%x::1", n), "/")
	}
	expect(t, passed, 256*5, "requests of one /56 pass")
}

// Known: a proof is a password. Whoever has it states any client, from anywhere,
// as often as he likes. Rotate it (two may be valid at once), and close the way
// past the sender where that is possible.
//
// Untrue when: a proof is bound to the request, to its time or to the sender's
// address.
func TestWeaknessStolenProofStatesAnyClient(t *testing.T) {
	i := newInstance(t, `http://test.local {
	edge_limit {
		client {
			proof Proxy-Authorization correct-horse-battery-staple
		}
		limit each 5/h
	}
	respond "{http.edge_limit.client_ip} {http.edge_limit.source}"
}`)
	for n := range 50 {
		w := i.send(requestFrom(alice, "/", "Proxy-Authorization: correct-horse-battery-staple", "X-Client-IP: "+clientNumber(n)))
		expect(t, w.Code, 200, "the thief passes")
		expect(t, w.Body.String(), clientNumber(n)+" proof", "as whom he likes")
	}
	w := i.send(requestFrom(alice, "/", "Proxy-Authorization: wrong", "X-Client-IP: "+bob))
	expect(t, w.Body.String(), alice+" connection", "without the secret he is himself")
}

// Known: with a burst of one, a fresh key and a blocked one owe the same, so that
// a table that is full of debts cannot tell them apart: the oldest goes first,
// and a flood of fresh keys frees who was blocked before it. With a burst of two
// it does not.
//
// Untrue when: denied attempts raise a debt, or tables tell blocked keys from
// fresh ones.
func TestWeaknessBurstOfOneInFullTable(t *testing.T) {
	for _, row := range []struct {
		burst  int
		status int
	}{
		{1, http.StatusOK},
		{2, http.StatusTooManyRequests},
	} {
		t.Run(fmt.Sprintf("burst %d", row.burst), func(t *testing.T) {
			i := newInstance(t, fmt.Sprintf(`{
	edge_limit {
		max_keys 100
	}
}
http://test.local {
	edge_limit {
		limit each 10/h {
			burst %d
		}
	}
	respond ok
}`, row.burst))
			expect(t, i.passed(10, alice, "/"), row.burst, "the burst passes")
			expect(t, i.get(alice, "/"), http.StatusTooManyRequests, "then the client is blocked")
			i.sleep(time.Second) // so that the flood is younger
			for n := range 1000 {
				expect(t, i.get(clientNumber(n), "/"), http.StatusOK, "each of a flood of fresh clients passes")
			}
			expect(t, i.get(alice, "/"), row.status, fmt.Sprintf("after the flood, with a burst of %d", row.burst))
		})
	}
}

// Known: two handlers are two runs. What the first one charged stays charged when
// the second one denies.
//
// Untrue when: all handlers of a request decide together.
func TestWeaknessHandlersDecideOneByOne(t *testing.T) {
	i := newInstance(t, `{
	edge_limit {
		limit before 5/h
		limit after 2/h
	}
}
http://test.local {
	route {
		edge_limit before
		edge_limit after
		respond ok
	}
}`)
	expect(t, i.passed(20, alice, "/"), 2, "requests pass")
	expect(t, i.limit(t, "before").count(outcomeAllowed), 5, "the first handler charged")
}

// Known: a charge that is made in a ledger whose debts have moved already is lost.
// It takes a request that is between the two in the moment in which a reload's
// numbers are taken over.
//
// Untrue when: a charge saw that its ledger was closed, and was made again.
func TestWeaknessChargeInTheLedgerBefore(t *testing.T) {
	const key, now = uint64(1 << 40), int64(time.Hour)
	from, to := numbersOf(t, "5/h", 0, 1000), numbersOf(t, "5/d", 0, 1000)
	state := newLimitState(from)
	held := state.of(key, now)
	state.adoptAll(to, now)
	held.take(held.Table, key, held.emissionInterval, now)
	after := state.of(key, now)
	expect(t, after.remaining(after.Peek(key, now), now), 5, "requests are left, where one of five was used")
}
