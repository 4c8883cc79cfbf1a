package edgelimit

import (
	"net/netip"
	"slices"
	"strings"
)

// What the command `probe` sends: requests by which a caller claims to be
// somebody else, in all the ways that were ever believed somewhere.

// headerLine is a header as it goes over the wire, in its very spelling.
type headerLine struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

func (l headerLine) String() string { return l.Name + ": " + l.Value }

// forgery is a forged request.
type forgery struct {
	title    string
	lines    []headerLine
	preamble string // what goes over the connection before the request
	claims   []claim
}

// claim is an address that a forgery names, and where.
type claim struct {
	addr      netip.Addr
	header    string
	fromRight int // its place in the header, from 1; 0 where it is no list
}

// forgeryKind makes forgeries of one kind, each time of other addresses.
type forgeryKind struct {
	title string
	http1 bool // HTTP/2 has no way to say it
	make  func(c *claimant) []headerLine

	// instead of headers: the PROXY protocol, which a listener may believe from
	// everybody
	preamble bool
}

const preambleName = "PROXY protocol"

func (k *forgeryKind) forge(c *claimant) forgery {
	c.claims = nil
	f := forgery{title: k.title}
	if k.preamble {
		f.preamble = "PROXY TCP4 " + c.ipv4(preambleName, 0) + " 127.0.0.1 4711 443\r\n"
	} else {
		f.lines = k.make(c)
	}
	if f.title == "" {
		f.title = f.lines[0].Name
	}
	f.claims = c.claims
	return f
}

// claimant hands out addresses of the ranges that are set aside for
// documentation (RFC 5737, RFC 3849), a new one each time: whichever is believed
// tells which header it stood in.
type claimant struct {
	honest netip.Addr // never handed out
	used4  int
	used6  int
	claims []claim
}

var documentationRanges = [...][3]byte{{192, 0, 2}, {198, 51, 100}, {203, 0, 113}}

func (c *claimant) ipv4(header string, fromRight int) string {
	const hosts = 254
	n := c.used4 % (len(documentationRanges) * hosts)
	c.used4++
	net := documentationRanges[n/hosts]
	addr := netip.AddrFrom4([4]byte{net[0], net[1], net[2], byte(1 + n%hosts)})
	if addr == c.honest {
		return c.ipv4(header, fromRight)
	}
	c.claims = append(c.claims, claim{addr, header, fromRight})
	return addr.String()
}

func (c *claimant) ipv6(header string, fromRight int) string {
	c.used6++
	addr := netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 6: byte(c.used6 >> 8), 7: byte(c.used6), 15: 1})
	if addr == c.honest {
		return c.ipv6(header, fromRight)
	}
	c.claims = append(c.claims, claim{addr, header, fromRight})
	return addr.String()
}

// chain is a list of n entries.
func (c *claimant) chain(header string, n int) string {
	entries := make([]string, n)
	for i := range entries {
		entries[i] = c.ipv4(header, n-i)
	}
	return strings.Join(entries, ", ")
}

// forgedSpelling is X-Forwarded-For with one entry in a spelling of its own: in format,
// <4> stands for an IPv4 address and <6> for an IPv6 address.
func forgedSpelling(title, format string) forgeryKind {
	return forgeryKind{title: title, make: func(c *claimant) []headerLine {
		return []headerLine{{headerForwardedFor, c.fill(format, headerForwardedFor)}}
	}}
}

func (c *claimant) fill(format, header string) string {
	for strings.Contains(format, "<4>") {
		format = strings.Replace(format, "<4>", c.ipv4(header, 0), 1)
	}
	for strings.Contains(format, "<6>") {
		format = strings.Replace(format, "<6>", c.ipv6(header, 0), 1)
	}
	return format
}

// forgedHeaders claims in each of these headers at once.
func forgedHeaders(title string, names []string) forgeryKind {
	return forgeryKind{title: title, make: func(c *claimant) (lines []headerLine) {
		for _, name := range names {
			lines = append(lines, headerLine{name, c.fill(forgedFormat(name), name)})
		}
		return lines
	}}
}

func forgedFormat(name string) string {
	switch {
	case foldName(name) == foldName(headerForwarded):
		return "for=<4>"
	case strings.HasSuffix(foldName(name), "v6"):
		return "<6>"
	}
	return "<4>"
}

func lookAlikes(sign string) []string {
	var names []string
	for _, name := range identityHeaders {
		if alike := strings.ReplaceAll(name, "-", sign); alike != name {
			names = append(names, alike)
		}
	}
	return names
}

// forgeryKinds are all that is sent, in this order.
func forgeryKinds() []forgeryKind {
	kinds := []forgeryKind{
		forgedSpelling("one entry", "<4>"),
		forgedSpelling("one entry, another address", "<4>"),
		forgedSpelling("one entry, IPv6", "<6>"),
		{title: "2 entries", make: forgedList(2)},
		{title: "5 entries", make: forgedList(5)},
		{title: "70 entries", make: forgedList(70)},
		{title: "two lines", make: func(c *claimant) []headerLine {
			left := c.ipv4(headerForwardedFor, 2)
			return []headerLine{{headerForwardedFor, left}, {headerForwardedFor, c.ipv4(headerForwardedFor, 1)}}
		}},
		{title: "two lines, spelled differently", http1: true, make: func(c *claimant) []headerLine {
			left := c.ipv4(headerForwardedFor, 2)
			return []headerLine{
				{strings.ToUpper(headerForwardedFor), left},
				{strings.ToLower(headerForwardedFor), c.ipv4(headerForwardedFor, 1)},
			}
		}},
		forgedCase("small letters", strings.ToLower),
		forgedCase("capital letters", strings.ToUpper),
		forgedSpelling("white space inside", "<4> \t ,\t <4>"),
		forgedSpelling("empty entries", ",<4>,,"),
		forgedSpelling("empty", ""),
		forgedSpelling("with a port", "<4>:4711"),
		forgedSpelling("IPv4 mapped to IPv6", "::ffff:<4>"),
		forgedSpelling("IPv4 mapped, brackets, port", "[::ffff:<4>]:4711"),
		forgedSpelling("brackets", "[<6>]"),
		forgedSpelling("brackets and port", "[<6>]:4711"),
		forgedSpelling("zone", "<6>%eth0"),
		forgedSpelling("quotes", `"<4>"`),
		forgedSpelling("two addresses, no comma", "<4> <4>"),
		forgedSpelling("before a loopback address", "<4>, 127.0.0.1"),
		forgedSpelling("before private addresses", "<4>, 10.0.0.1, 192.168.0.1, fd00::1"),
		forgedSpelling("before garbage", "<4>, hello, unknown, 999.1.2.3, \xff\xfe"),
		forgedSpelling("garbage", "hello"),
		forgedSpelling("the word unknown", "unknown"),
		forgedForwarded("for=<4>"),
		forgedForwarded(`for="[<6>]:4711";proto=https`),
		forgedForwarded("for=<4>, for=<4>"),
		forgedForwarded(`for="<4>`), // to swallow what a proxy appends
	}
	for _, name := range identityHeaders {
		if name != headerForwardedFor && name != headerForwarded {
			kinds = append(kinds, forgedHeaders("", []string{name}))
		}
	}
	return append(kinds,
		forgedHeaders("all of these at once", identityHeaders),
		forgedHeaders("rare headers, all at once", rareIdentityHeaders),
		forgedHeaders("a look-alike", lookAlikes("_")[:1]),
		forgedHeaders("a look-alike", lookAlikes(".")[:1]),
		forgedHeaders("look-alikes with _", lookAlikes("_")),
		forgedHeaders("look-alikes with .", lookAlikes(".")),
		forgedConnection("Connection names it", ""),
		forgedConnection("Connection names it, forged too", "<4>"),
		forgeryKind{title: "the PROXY protocol", preamble: true},
	)
}

func forgedList(n int) func(*claimant) []headerLine {
	return func(c *claimant) []headerLine {
		return []headerLine{{headerForwardedFor, c.chain(headerForwardedFor, n)}}
	}
}

func forgedCase(title string, spell func(string) string) forgeryKind {
	return forgeryKind{title: title, http1: true, make: func(c *claimant) []headerLine {
		return []headerLine{{spell(headerForwardedFor), c.ipv4(headerForwardedFor, 1)}}
	}}
}

func forgedForwarded(format string) forgeryKind {
	return forgeryKind{make: func(c *claimant) []headerLine {
		return []headerLine{{headerForwarded, c.fill(format, headerForwarded)}}
	}}
}

// forgedConnection names the identity headers in Connection, by which proxies can
// be brought to drop what they or others wrote.
func forgedConnection(title, format string) forgeryKind {
	return forgeryKind{title: title, http1: true, make: func(c *claimant) []headerLine {
		lines := []headerLine{{"Connection", "keep-alive, " + strings.Join(identityHeaders, ", ")}}
		if format != "" {
			lines = append(lines, headerLine{headerForwardedFor, c.fill(format, headerForwardedFor)})
		}
		return lines
	}}
}

// claimOf is the claim that addr comes from.
func (f *forgery) claimOf(addr netip.Addr) (claim, bool) {
	i := slices.IndexFunc(f.claims, func(c claim) bool { return c.addr == addr })
	if i < 0 {
		return claim{}, false
	}
	return f.claims[i], true
}
