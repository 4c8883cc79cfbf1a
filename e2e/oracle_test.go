package e2e

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
)

// Programs that are known to read a chain rightly must agree with us about every
// chain of well-formed addresses. What is malformed is left to other tests, since
// each program has its own way with it.

const chains = 3000

// trustedRanges are what all sides trust; the visitors' addresses are drawn from
// others.
var trustedRanges = []string{"127.0.0.0/28", "10.0.0.0/8", "2001:db8:7:7::/64"}

// chainMaker makes random chains, the same ones in each run.
type chainMaker struct {
	*rand.Rand
	spellings []func(netip.Addr) string
}

// chain makes the header lines of a chain, and its entries from left to right.
func (m *chainMaker) chain() (lines []string, entries []netip.Addr) {
	var line string
	for range 1 + m.IntN(8) {
		entry := m.address()
		entries = append(entries, entry)
		text := m.spellings[m.IntN(len(m.spellings))](entry)
		switch {
		case line == "":
			line = text
		case m.IntN(5) == 0:
			lines = append(lines, "X-Forwarded-For: "+line)
			line = text
		default:
			line += []string{",", ", ", " , "}[m.IntN(3)] + text
		}
	}
	return append(lines, "X-Forwarded-For: "+line), entries
}

// address is a trusted proxy, its neighbour just outside the range, or anybody.
func (m *chainMaker) address() netip.Addr {
	v4 := func(a, b, c, d int) netip.Addr { return netip.AddrFrom4([4]byte{byte(a), byte(b), byte(c), byte(d)}) }
	v6 := func(group, host int) netip.Addr {
		return netip.MustParseAddr(fmt.Sprintf("2001:db8:7:%x::%x", group, host))
	}
	switch m.IntN(8) {
	case 0, 1:
		return v4(127, 0, 0, 1+m.IntN(15))
	case 2, 3:
		return v4(10, m.IntN(256), m.IntN(256), m.IntN(256))
	case 4:
		return v6(7, 1+m.IntN(1<<16-1))
	case 5:
		return v4([]int{9, 11}[m.IntN(2)], m.IntN(256), m.IntN(256), m.IntN(256))
	case 6:
		return v6([]int{6, 8}[m.IntN(2)], 1+m.IntN(1<<16-1))
	default:
		return v4(127, 0, 0, 16+m.IntN(200))
	}
}

// Spellings of one address.
func plainly(addr netip.Addr) string { return addr.String() }

func inFull(addr netip.Addr) string {
	if addr.Is4() {
		return addr.String()
	}
	return strings.ToUpper(addr.StringExpanded())
}

func withPort(addr netip.Addr) string { return netip.AddrPortFrom(addr, 51234).String() }

func withPortIfIPv4(addr netip.Addr) string {
	if addr.Is4() {
		return withPort(addr)
	}
	return plainly(addr)
}

func mapped(addr netip.Addr) string { return netip.AddrFrom16(addr.As16()).String() }

func allTrusted(entries []netip.Addr) bool {
	for _, entry := range entries {
		trusted := false
		for _, text := range trustedRanges {
			trusted = trusted || netip.MustParsePrefix(text).Contains(entry)
		}
		if !trusted {
			return false
		}
	}
	return true
}

// compare sends the same random chains to the probe and to another program that
// answers with the client alone, from a trusted peer and from a stranger. Where
// all entries are trusted, others go on to the left end, or back to the peer;
// we stay at the rightmost entry, what the nearest proxy saw.
func compare(t *testing.T, m *chainMaker, probeURL, oracleURL, host string) {
	t.Helper()
	trusted, stranger := clientFrom(t, "127.0.0.1"), clientFrom(t, "127.0.0.20")
	var walked, wholly int
	for n := range chains {
		lines, entries := m.chain()
		via := trusted
		if n%20 == 0 {
			via = stranger
		}
		got := probe(t, via, probeURL, lines...).client()
		if via == trusted && allTrusted(entries) {
			wholly++
			if want := entries[len(entries)-1].String(); got != want {
				t.Errorf("all trusted, %q: we say %s, want the rightmost, %s", lines, got, want)
			}
			continue
		}
		walked++
		r := request(t, oracleURL, lines...)
		r.Host = host
		text := string(do(t, via, r).body)
		want, err := netip.ParseAddr(text)
		if err != nil {
			t.Fatalf("%q: the oracle says %q: %v", lines, text, err)
		}
		if got != want.Unmap().String() {
			t.Errorf("%q: we say %s, the oracle %s", lines, got, want)
		}
	}
	if walked < chains/2 || wholly < chains/50 {
		t.Errorf("%d chains with a stranger and %d without are too few to mean something", walked, wholly)
	}
}

func TestAgreesWithNginxRealIPRecursive(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	addr, oracle := freeAddr(t), freeAddr(t)
	startNginx(t, oracle, `
server {
	listen `+oracle+`;
	set_real_ip_from `+strings.Join(trustedRanges, ";\nset_real_ip_from ")+`;
	real_ip_header X-Forwarded-For;
	real_ip_recursive on;
	return 200 "$remote_addr";
}`)
	startCaddy(t, "", site(addr, `
		edge_limit {
			client {
				trusted_proxies static `+strings.Join(trustedRanges, " ")+`
			}
		}
		edge_limit_probe`))
	m := &chainMaker{rand.New(rand.NewPCG(1, 1)), []func(netip.Addr) string{plainly, plainly, inFull, withPort, mapped}}
	compare(t, m, "http://"+addr, "http://"+oracle, "")
}

func TestAgreesWithStrictCaddy(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	addr := freeAddr(t)
	startCaddy(t, `
		servers {
			trusted_proxies static `+strings.Join(trustedRanges, " ")+`
			trusted_proxies_strict
		}`, site(addr, "edge_limit\nedge_limit_probe")+
		"http://oracle.test:"+portOf(addr)+" {\nbind 127.0.0.1\nrespond {client_ip}\n}")
	// Two spellings are left out, since Caddy has its own way with them: it skips
	// an IPv6 address with a port if a space precedes it, and takes an
	// IPv4-mapped address for an IPv6 one, which no IPv4 range contains.
	m := &chainMaker{rand.New(rand.NewPCG(2, 2)), []func(netip.Addr) string{plainly, plainly, inFull, withPortIfIPv4}}
	compare(t, m, "http://"+addr, "http://"+addr, "oracle.test")
}
