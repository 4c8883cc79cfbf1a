package chain

import (
	"net/netip"
	"strings"
	"testing"
)

// addrs are entries and the address that each states, empty for none.
var addrs = []struct {
	why   string
	entry string
	want  string
}{
	{"IPv4", "203.0.113.7", "203.0.113.7"},
	{"the longest IPv4", "223.255.255.255", "223.255.255.255"},
	{"private", "10.0.0.2", "10.0.0.2"},
	{"loopback", "127.0.0.1", "127.0.0.1"},
	{"this network, but not unspecified", "0.0.0.1", "0.0.0.1"},
	{"reserved, but not broadcast", "255.255.255.254", "255.255.255.254"},
	{"a port is not part of an address", "203.0.113.7:51234", "203.0.113.7"},
	{"port 0", "203.0.113.7:0", "203.0.113.7"},
	{"the highest port", "203.0.113.7:65535", "203.0.113.7"},
	{"a port with leading zeros is the same port", "203.0.113.7:00080", "203.0.113.7"},
	{"IPv6", "2001:db8::1", "2001:db8::1"},
	{"IPv6 in capitals and with zeros", "2001:0DB8:0:0:0:0:0:1", "2001:db8::1"},
	{"the longest IPv6", "2001:0db8:0000:0000:0000:0000:0000:0001", "2001:db8::1"},
	{"IPv6 with dots, not mapped", "2001:db8::192.0.2.1", "2001:db8::c000:201"},
	{"IPv6 with the ellipsis at its end", "2001:db8::", "2001:db8::"},
	{"what looks like a port is part of the address", "2001:db8::1:443", "2001:db8::1:443"},
	{"loopback", "::1", "::1"},
	{"IPv6 in brackets", "[2001:db8::1]", "2001:db8::1"},
	{"IPv6 in brackets and a port", "[2001:db8::1]:443", "2001:db8::1"},
	{"a zone is not part of the client", "fe80::1%eth0", "fe80::1"},
	{"a zone of digits, as on Windows", "fe80::1%12", "fe80::1"},
	{"a zone as it is written in URLs", "[fe80::1%25eth0]", "fe80::1"},
	{"a zone inside brackets, and a port", "[fe80::1%eth0.7]:443", "fe80::1"},
	{"a long zone", "fe80::1%" + strings.Repeat("eth0", 1000), "fe80::1"},
	{"IPv4-mapped is the IPv4 client", "::ffff:203.0.113.7", "203.0.113.7"},
	{"IPv4-mapped in hexadecimal", "::FFFF:cb00:7107", "203.0.113.7"},
	{"IPv4-mapped at full length", "0000:0000:0000:0000:0000:ffff:203.000.113.7", ""},
	{"IPv4-mapped at full length", "0000:0000:0000:0000:0000:ffff:203.200.113.207", "203.200.113.207"},
	{"IPv4-mapped in brackets", "[::ffff:1.2.3.4]", "1.2.3.4"},
	{"IPv4-mapped in brackets and a port", "[::ffff:1.2.3.4]:80", "1.2.3.4"},
	{"IPv4-mapped with a zone", "::ffff:1.2.3.4%eth0", "1.2.3.4"},
	{"an IPv4 inside another IPv6 form is not that IPv4", "2002:0a00:0001::1", "2002:a00:1::1"},
	{"nor is it behind NAT64", "64:ff9b::10.0.0.1", "64:ff9b::a00:1"},
	{"nor is the old compatible form", "::10.0.0.1", "::a00:1"},
	{"white space around", " \t203.0.113.7\t ", "203.0.113.7"},
	{"white space around brackets", " [2001:db8::1]:443 ", "2001:db8::1"},

	{"nothing", "", ""},
	{"white space", " \t ", ""},
	{"a word", "unknown", ""},
	{"an obfuscated name", "_hidden", ""},
	{"a word", "hello", ""},
	{"a word of hexadecimal digits", "bad", ""},
	{"a name", "client.example", ""},
	{"a name with a port", "localhost:80", ""},
	{"a Unix socket", "unix:", ""},
	{"a Unix socket", "unix:/run/app.sock", ""},
	{"an address in quotes", `"203.0.113.7"`, ""},
	{"an address in half quotes", `203.0.113.7"`, ""},
	{"an address in single quotes", "'203.0.113.7'", ""},
	{"an address behind a name", "for=203.0.113.7", ""},
	{"a range", "203.0.113.0/24", ""},
	{"two addresses, as a folded line leaves them", "203.0.113.7 10.0.0.1", ""},
	{"two addresses", "203.0.113.7,10.0.0.1", ""},
	{"an address and more", "1.2.3.4 5", ""},
	{"white space before a port", "1.2.3.4 :80", ""},
	{"white space inside brackets", "[ ::1 ]", ""},
	{"three octets", "1.2.3", ""},
	{"five octets", "1.2.3.4.5", ""},
	{"one number", "16909060", ""},
	{"a negative number", "-1.2.3.4", ""},
	{"a signed number", "+1.2.3.4", ""},
	{"an octet above 255", "203.0.113.256", ""},
	{"a huge octet", "1.2.3.4294967300", ""},
	{"an empty octet", "1..2.3", ""},
	{"a trailing dot", "1.2.3.4.", ""},
	{"a leading dot", ".1.2.3.4", ""},
	{"octets that look octal", "010.0.0.1", ""},
	{"octets that look octal", "10.0.0.01", ""},
	{"octets with two zeros", "00.0.0.1", ""},
	{"octets in hexadecimal", "0x0a.0.0.1", ""},
	{"octets that look octal inside IPv6", "::ffff:010.0.0.1", ""},
	{"digits of another script", "１.2.3.4", ""},
	{"digits of another script", "١.2.3.4", ""},
	{"a dot of another script", "1。2.3.4", ""},
	{"unspecified", "0.0.0.0", ""},
	{"unspecified with a port", "0.0.0.0:80", ""},
	{"unspecified", "::", ""},
	{"unspecified in brackets", "[::]:80", ""},
	{"unspecified with a zone", "::%eth0", ""},
	{"unspecified, spelled out", "0:0:0:0:0:0:0:0", ""},
	{"unspecified, mapped", "::ffff:0.0.0.0", ""},
	{"multicast", "224.0.0.1", ""},
	{"multicast", "239.255.255.255", ""},
	{"multicast", "ff02::1", ""},
	{"multicast with a zone", "ff02::1%eth0", ""},
	{"multicast, mapped", "::ffff:224.0.0.1", ""},
	{"broadcast", "255.255.255.255", ""},
	{"broadcast, mapped", "[::ffff:255.255.255.255]:80", ""},
	{"an empty port", "1.2.3.4:", ""},
	{"an empty port", "[::1]:", ""},
	{"a port above 65535", "203.0.113.7:65536", ""},
	{"a port above 65535", "203.0.113.7:99999", ""},
	{"a port of six digits", "203.0.113.7:000080", ""},
	{"a port above 65535", "[::1]:65536", ""},
	{"a signed port", "1.2.3.4:+80", ""},
	{"a signed port", "1.2.3.4:-80", ""},
	{"a named port", "1.2.3.4:http", ""},
	{"a port in hexadecimal", "1.2.3.4:0x50", ""},
	{"a port with a separator", "1.2.3.4:8_0", ""},
	{"a port of another script", "1.2.3.4:８０", ""},
	{"two ports", "1.2.3.4:80:80", ""},
	{"two ports", "[::1]:80:80", ""},
	{"a port alone", ":80", ""},
	{"an obfuscated port belongs to a node", "1.2.3.4:_x1", ""},
	{"an obfuscated port behind brackets, too", "[::1]:_x1", ""},
	{"brackets are for IPv6", "[1.2.3.4]", ""},
	{"brackets are for IPv6", "[1.2.3.4]:80", ""},
	{"brackets around nothing", "[]", ""},
	{"brackets around nothing", "[]:80", ""},
	{"brackets around a word", "[unknown]", ""},
	{"a bracket that opens only", "[::1", ""},
	{"a bracket that closes only", "::1]", ""},
	{"a bracket that closes only", "::1]:80", ""},
	{"two brackets", "[[::1]]", ""},
	{"text before brackets", "x[::1]", ""},
	{"text behind brackets", "[::1]x", ""},
	{"a port behind brackets without its colon", "[::1]80", ""},
	{"a port inside brackets", "[1.2.3.4:80]", ""},
	{"a zone behind brackets", "[fe80::1]%eth0", ""},
	{"an empty zone", "fe80::1%", ""},
	{"an empty zone in brackets", "[fe80::1%]:80", ""},
	{"a zone of an IPv4", "1.2.3.4%eth0", ""},
	{"a zone of an IPv4, and a port", "1.2.3.4%eth0:80", ""},
	{"a zone alone", "%eth0", ""},
	{"a zone, and a port without brackets", "fe80::1%eth0:80", ""},
	{"a zone with a space", "fe80::1%eth 0", ""},
	{"a zone with NUL", "fe80::1%eth0\x00", ""},
	{"a zone with a quote", `fe80::1%eth0"`, ""},
	{"two zones", "fe80::1%eth0%eth1", ""},
	{"nine groups", "1:2:3:4:5:6:7:8:9", ""},
	{"seven groups", "1:2:3:4:5:6:7", ""},
	{"two ellipses", "1::2::3", ""},
	{"an ellipsis that stands for nothing", "1:2:3:4::5:6:7:8", ""},
	{"three colons", ":::", ""},
	{"one colon", ":", ""},
	{"a trailing colon", "1:2:3:4:5:6:7:8:", ""},
	{"a leading colon", ":1:2:3:4:5:6:7", ""},
	{"a group of five digits", "2001:0db81::1", ""},
	{"a letter that is no digit", "2001:dg8::1", ""},
	{"NUL", "\x00", ""},
	{"NUL behind an address", "1.2.3.4\x00", ""},
	{"NUL before an address", "\x001.2.3.4", ""},
	{"a line feed", "1.2.3.4\n", ""},
	{"a carriage return", "1.2.3.4\r", ""},
	{"a vertical tab", "\v1.2.3.4", ""},
	{"a form feed", "1.2.3.4\f", ""},
	{"a no-break space", "\u00a01.2.3.4", ""},
	{"an ideographic space", "1.2.3.4\u3000", ""},
	{"a zero width space", "1.2.3.4\u200b", ""},
	{"a byte order mark", "\ufeff1.2.3.4", ""},
	{"NEL as one byte", "1.2.3.4\x85", ""},
	{"bytes that are no UTF-8", "\xff\xfe", ""},
	{"a backslash", `1.2.3.4\`, ""},
	{"a comment", "1.2.3.4 (proxy)", ""},
	{"a user", "x@1.2.3.4", ""},
	{"a URL", "http://1.2.3.4", ""},
	{"very many digits", strings.Repeat("1", 16<<10), ""},
	{"very many dots", "1" + strings.Repeat(".1", 8<<10), ""},
	{"very many colons", strings.Repeat(":", 16<<10), ""},
}

func TestParseAddr(t *testing.T) {
	for _, test := range addrs {
		checkAddr(t, "entry", ParseAddr, test.why, test.entry, test.want)
	}
}

func TestParseNode(t *testing.T) {
	for _, test := range addrs {
		if strings.Contains(test.entry, ":_") {
			continue // the difference between the two, below
		}
		checkAddr(t, "node", ParseNode, test.why, test.entry, test.want)
	}
	for _, test := range []struct {
		why  string
		node string
		want string
	}{
		{"an obfuscated port", "203.0.113.7:_x1", "203.0.113.7"},
		{"of all characters", "203.0.113.7:_aZ09._-", "203.0.113.7"},
		{"of digits", "203.0.113.7:_80", "203.0.113.7"},
		{"a long one", "203.0.113.7:_" + strings.Repeat("x", 1000), "203.0.113.7"},
		{"behind brackets", "[2001:db8::1]:_x1", "2001:db8::1"},
		{"behind a mapped address", "[::ffff:1.2.3.4]:_x1", "1.2.3.4"},
		{"behind an address that is no client's", "0.0.0.0:_x1", ""},
		{"an empty one", "203.0.113.7:_", ""},
		{"with another character", "203.0.113.7:_x!", ""},
		{"with a space", "203.0.113.7:_x 1", ""},
		{"with a colon", "203.0.113.7:_x:1", ""},
		{"with NUL", "203.0.113.7:_x\x00", ""},
		{"with a letter of another script", "203.0.113.7:_ä", ""},
		{"without its underscore", "203.0.113.7:x1", ""},
		{"behind IPv6 without brackets: where would it begin?", "2001:db8::1:_x1", ""},
		{"behind an obfuscated name", "_hidden:_x1", ""},
		{"behind a word", "unknown:_x1", ""},
		{"behind nothing", ":_x1", ""},
	} {
		checkAddr(t, "node", ParseNode, test.why, test.node, test.want)
		if strings.Contains(test.node, ":_") {
			checkAddr(t, "entry", ParseAddr, test.why, test.node, "")
		}
	}
}

func checkAddr(t *testing.T, what string, parse func(string) (netip.Addr, bool), why, text, want string) {
	t.Helper()
	a, ok := parse(text)
	switch {
	case ok != (want != ""):
		t.Errorf("%s: %s %.80q: address %v, %t", why, what, text, a, ok)
	case ok && a != netip.MustParseAddr(want):
		t.Errorf("%s: %s %.80q: address %v, want %v", why, what, text, a, want)
	case !ok && a != netip.Addr{}:
		t.Errorf("%s: %s %.80q: refused, but with %v", why, what, text, a)
	}
}

func TestCanonical(t *testing.T) {
	for _, test := range []struct {
		why  string
		addr netip.Addr
		want string
	}{
		{"IPv4 stays", netip.MustParseAddr("203.0.113.7"), "203.0.113.7"},
		{"IPv6 stays", netip.MustParseAddr("2001:db8::1"), "2001:db8::1"},
		{"a zone goes", netip.MustParseAddr("fe80::1%eth0"), "fe80::1"},
		{"mapped becomes IPv4", netip.MustParseAddr("::ffff:203.0.113.7"), "203.0.113.7"},
		{"mapped with a zone becomes IPv4", netip.MustParseAddr("::ffff:203.0.113.7").WithZone("eth0"), "203.0.113.7"},
		{"NAT64 stays: only keys look inside", netip.MustParseAddr("64:ff9b::a00:1"), "64:ff9b::a00:1"},
		{"loopback can be a client", netip.MustParseAddr("::1"), "::1"},
		{"the zero Addr", netip.Addr{}, ""},
		{"unspecified IPv4", netip.IPv4Unspecified(), ""},
		{"unspecified IPv6", netip.IPv6Unspecified(), ""},
		{"unspecified with a zone", netip.IPv6Unspecified().WithZone("eth0"), ""},
		{"unspecified, mapped", netip.MustParseAddr("::ffff:0.0.0.0"), ""},
		{"multicast IPv4", netip.MustParseAddr("224.0.0.251"), ""},
		{"multicast IPv6", netip.IPv6LinkLocalAllNodes(), ""},
		{"multicast, mapped", netip.MustParseAddr("::ffff:224.0.0.251"), ""},
		{"broadcast", netip.MustParseAddr("255.255.255.255"), ""},
		{"broadcast, mapped", netip.MustParseAddr("::ffff:255.255.255.255"), ""},
	} {
		a, ok := Canonical(test.addr)
		if ok != (test.want != "") || ok && a != netip.MustParseAddr(test.want) || !ok && a.IsValid() {
			t.Errorf("%s: %v becomes %v, %t, want %q", test.why, test.addr, a, ok, test.want)
		}
	}
}

// Nothing allocates but text that is made like an address and is none: that
// costs netip's error, which does not grow with the text.
func TestParsingAllocatesNothing(t *testing.T) {
	zoned := netip.MustParseAddr("fe80::1%eth0")
	if allocs := testing.AllocsPerRun(100, func() { Canonical(zoned) }); allocs != 0 {
		t.Errorf("making %v canonical: %v allocations", zoned, allocs)
	}
	for _, test := range addrs {
		allowed := 0.0
		if likeAddress(test.entry) && test.want == "" {
			allowed = 1
		}
		for name, parse := range map[string]func(string) (netip.Addr, bool){"entry": ParseAddr, "node": ParseNode} {
			if allocs := testing.AllocsPerRun(100, func() { parse(test.entry) }); allocs > allowed {
				t.Errorf("%s: %s %.80q: %v allocations, want at most %v", test.why, name, test.entry, allocs, allowed)
			}
		}
	}
}

// likeAddress reports whether text is short and made of the characters that
// addresses are made of.
func likeAddress(text string) bool {
	return len(text) <= 64 && strings.Trim(text, "0123456789abcdefABCDEF:.[] \t") == ""
}

func FuzzParseAddr(f *testing.F) {
	for _, test := range addrs {
		if len(test.entry) < 100 {
			f.Add(test.entry)
		}
	}
	f.Fuzz(func(t *testing.T, entry string) {
		a, ok := ParseAddr(entry)
		if b, okNode := ParseNode(entry); okNode != ok && !strings.Contains(entry, ":_") || ok && b != a {
			t.Errorf("%q is read as %v, %t, but as a node as %v, %t", entry, a, ok, b, okNode)
		}
		if !ok {
			if a != (netip.Addr{}) {
				t.Errorf("%q is refused, but with %v", entry, a)
			}
			// What the standard library reads is refused only if it is no
			// client's, or has a zone, in which we allow fewer characters.
			if b, err := netip.ParseAddr(entry); err == nil && b.Zone() == "" {
				if c, ok := Canonical(b); ok {
					t.Errorf("%q is refused, and is %v", entry, c)
				}
			}
			return
		}

		switch {
		case !a.IsValid(), a.IsUnspecified(), a.IsMulticast(), a.String() == "255.255.255.255":
			t.Errorf("%q is read as %v, which is no client", entry, a)
		case a.Is4In6():
			t.Errorf("%q is read as %v, which is mapped", entry, a)
		case a.Zone() != "":
			t.Errorf("%q is read as %v, which has a zone", entry, a)
		}
		if b, ok := Canonical(a); !ok || b != a {
			t.Errorf("%q is read as %v, which would be canonical as %v, %t", entry, a, b, ok)
		}
		forms := []string{a.String(), a.StringExpanded(), " " + entry + "\t", netip.AddrPortFrom(a, 443).String()}
		if a.Is4() {
			forms = append(forms, "::ffff:"+a.String(), "[::ffff:"+a.String()+"%x]:1")
		} else {
			forms = append(forms, a.String()+"%x", strings.ToUpper(a.String()), "["+a.String()+"]")
		}
		for _, form := range forms {
			for _, parse := range []func(string) (netip.Addr, bool){ParseAddr, ParseNode} {
				if b, ok := parse(form); !ok || b != a {
					t.Errorf("%q is read as %v, but %q as %v, %t", entry, a, form, b, ok)
				}
			}
		}
		// The standard library, where it reads the entry at all, agrees.
		plain := strings.Trim(entry, " \t")
		if b, err := netip.ParseAddr(plain); err == nil {
			if c, _ := Canonical(b); c != a {
				t.Errorf("%q is read as %v, want %v", entry, a, c)
			}
		} else if b, err := netip.ParseAddrPort(plain); err == nil {
			if c, _ := Canonical(b.Addr()); c != a {
				t.Errorf("%q is read as %v, want %v", entry, a, c)
			}
		} else if !strings.HasPrefix(plain, "[") || !strings.HasSuffix(plain, "]") {
			t.Errorf("%q is read as %v, and the standard library has: %v", entry, a, err)
		}
		for _, garbage := range []string{
			"x" + plain, "," + plain, `"` + plain + `"`, "[[" + plain, plain + `"`, plain + "\x00", plain + "\u00a0", plain + " 1.2.3.4", plain + "]]",
		} {
			if b, ok := ParseAddr(garbage); ok {
				t.Errorf("%q is read as %v", garbage, b)
			}
		}
	})
}
