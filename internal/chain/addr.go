package chain

import (
	"net/netip"
	"strings"
)

const (
	digits  = "0123456789"
	letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
)

var (
	portChars  = newCharSet(digits)
	ipv6Chars  = newCharSet(digits + "abcdefABCDEF:.")
	zoneChars  = newCharSet(digits + letters + "-._~")            // RFC 6874
	obfChars   = newCharSet(digits + letters + "-._")             // RFC 7239, section 6.3
	tokenChars = newCharSet(digits + letters + "!#$%&'*+-.^_`|~") // RFC 9110, section 5.6.2
)

const maxIPv6Text = len("0000:0000:0000:0000:0000:ffff:255.255.255.255")

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// ParseAddr returns the client address that an entry of a list states, in its
// canonical form (see [Canonical]), and whether it states one.
//
// These are accepted, with white space (SP, HTAB) around them:
//
//   - 192.0.2.1 and 192.0.2.1:51234
//   - 2001:db8::1 (what looks like a port behind it is a part of it)
//   - [2001:db8::1] and [2001:db8::1]:51234
//   - any of the three IPv6 forms with a zone: fe80::1%eth0, [fe80::1%eth0]:443
//
// A port is 1 to 5 digits, up to 65535. Everything else is no address: octets
// with leading zeros, trailing dots, names, quotes, brackets around IPv4, words
// such as "unknown", two addresses with a space between them.
func ParseAddr(entry string) (netip.Addr, bool) {
	return parse(entry, isPort)
}

// ParseNode is [ParseAddr] for a node of RFC 7239, whose port may also be an
// obfuscated one (192.0.2.1:_x1). It is more lenient than the RFC: an IPv6
// address needs no brackets. A node whose name is "unknown" or obfuscated is no
// address.
func ParseNode(node string) (netip.Addr, bool) {
	return parse(node, isNodePort)
}

// Canonical returns the one form in which an address is compared and counted,
// and whether it can be a client's at all. Zones are removed, and IPv4-mapped
// IPv6 becomes IPv4; other addresses that have an IPv4 address inside stay what
// they are. No client has an unspecified, a multicast, the broadcast or the zero
// [netip.Addr]: for these it returns the zero Addr and false.
func Canonical(a netip.Addr) (netip.Addr, bool) {
	a = a.WithZone("").Unmap()
	if !a.IsValid() || a.IsUnspecified() || a.IsMulticast() || a == broadcast {
		return netip.Addr{}, false
	}
	return a, true
}

func parse(text string, isPort func(string) bool) (netip.Addr, bool) {
	text = strings.Trim(text, " \t")
	if inner, bracketed := strings.CutPrefix(text, "["); bracketed {
		host, after, closed := strings.Cut(inner, "]")
		port, hasPort := strings.CutPrefix(after, ":")
		switch {
		case !closed:
			return netip.Addr{}, false
		case hasPort && !isPort(port):
			return netip.Addr{}, false
		case !hasPort && after != "":
			return netip.Addr{}, false
		}
		return parseIPv6(host)
	}
	host, after, colon := strings.Cut(text, ":")
	switch {
	case !colon:
		return parseIPv4(text)
	case strings.IndexByte(after, ':') >= 0: // two colons or more
		return parseIPv6(text)
	case !isPort(after):
		return netip.Addr{}, false
	}
	return parseIPv4(host)
}

// parseIPv4 is netip's grammar: four numbers up to 255, without leading zeros.
// It is most of what there is to parse, so it is read in one pass.
func parseIPv4(text string) (netip.Addr, bool) {
	var octets [4]byte
	n, octet, digits := 0, 0, 0
	for i := range len(text) {
		c := text[i]
		switch {
		case '0' <= c && c <= '9':
			if digits > 0 && octet == 0 {
				return netip.Addr{}, false
			}
			if octet = 10*octet + int(c-'0'); octet > 255 {
				return netip.Addr{}, false
			}
			digits++
		case c == '.' && digits > 0 && n < 3:
			octets[n] = byte(octet)
			n, octet, digits = n+1, 0, 0
		default:
			return netip.Addr{}, false
		}
	}
	if n < 3 || digits == 0 {
		return netip.Addr{}, false
	}
	octets[3] = byte(octet)
	return Canonical(netip.AddrFrom4(octets))
}

// netip makes an error of what it cannot parse and interns zones, and both
// allocate: so it is asked only about text that is likely to be an address, and
// never about a zone.

func parseIPv6(text string) (netip.Addr, bool) {
	text, zone, zoned := strings.Cut(text, "%")
	if zoned && (zone == "" || !only(zone, zoneChars)) {
		return netip.Addr{}, false
	}
	if len(text) > maxIPv6Text || strings.Count(text, ":") < 2 || !only(text, ipv6Chars) {
		return netip.Addr{}, false
	}
	a, err := netip.ParseAddr(text)
	if err != nil {
		return netip.Addr{}, false
	}
	return Canonical(a)
}

func isPort(text string) bool {
	if text == "" || len(text) > 5 || !only(text, portChars) {
		return false
	}
	return len(text) < 5 || text <= "65535"
}

func isNodePort(text string) bool {
	if name, obfuscated := strings.CutPrefix(text, "_"); obfuscated {
		return name != "" && only(name, obfChars)
	}
	return isPort(text)
}

// charSet is a set of bytes.
type charSet [256]bool

func newCharSet(chars string) *charSet {
	set := new(charSet)
	for i := range len(chars) {
		set[chars[i]] = true
	}
	return set
}

// complement returns the set of all other bytes.
func (s *charSet) complement() *charSet {
	others := new(charSet)
	for char, in := range s {
		others[char] = !in
	}
	return others
}

// span returns how many bytes text begins with that are in the set.
func (s *charSet) span(text string) int {
	for i := range len(text) {
		if !s[text[i]] {
			return i
		}
	}
	return len(text)
}

// only reports whether text holds no byte but the allowed ones.
func only(text string, allowed *charSet) bool {
	return allowed.span(text) == len(text)
}
